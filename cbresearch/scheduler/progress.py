"""What a step's result means for a request that took part."""

from cbresearch.plan import Scheduled, StepResult
from cbresearch.request import RequestState
from cbresearch.scheduler.memory import Memory


def take_in(state: RequestState, entry: Scheduled, result: StepResult, memory: Memory, now: float) -> bool:
    """Take in what a step did for a request, and return whether the request is finished by it.

    Args:
        state: The request.
        entry: Its part of the step.
        result: What came of the step.
        memory: The KV side.
        now: Seconds since the start of the run, at the end of the step.
    """
    request_id, _, start, num_tokens, _, samples, _ = entry
    if result.failed and request_id in result.failed:
        state.finish_reason, state.error = "error", result.failed[request_id]
        memory.disown(state)
        return True
    end = state.num_computed_tokens = start + num_tokens
    covered = state.num_covered_tokens
    if start < covered:
        state.num_recomputed_tokens += min(end, covered) - start
    if end > covered:
        state.num_covered_tokens = end
    memory.settle(state, start)
    if not samples:
        return False
    output = state.output_token_ids
    output.append(result.tokens[request_id])
    state.num_tokens += 1
    state.token_times.append(now)
    if request_id in result.logprobs:
        state.logprobs.append(result.logprobs[request_id])
    if request_id in result.stopped:
        state.finish_reason = "stop"
    elif len(output) >= state.request.max_tokens:
        state.finish_reason = "length"
    return state.finish_reason is not None
