"""Serve with a real model: carry out a scheduler's plans, as an experiment or online."""

from cbresearch.engine.executor import ModelExecutor
from cbresearch.engine.online import Answer, Engine
from cbresearch.engine.queue import QueueFull
from cbresearch.engine.token_stream import Output, StreamedToken, TokenStream

__all__ = ["Answer", "Engine", "ModelExecutor", "Output", "QueueFull", "StreamedToken", "TokenStream"]
