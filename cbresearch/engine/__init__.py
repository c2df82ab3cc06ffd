"""Serve with a real model: carry out a scheduler's plans."""

from cbresearch.engine.executor import ModelExecutor

__all__ = ["ModelExecutor"]
