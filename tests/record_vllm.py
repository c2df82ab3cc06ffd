"""Record what vLLM's v1 scheduler decides, in the format of `tests/oracle/README.md`.

    PYTHON_OF_VLLM tests/record_vllm.py 200 > FILE         random workloads with duplicate contents
    PYTHON_OF_VLLM tests/record_vllm.py WORKLOADS > FILE   the workloads of a file, whose steps are made anew

The interpreter is that of an environment which `tests/set_up_vllm.py` made. Only vLLM's scheduler and block
manager run, with no model behind them. `tests/conformance.py FILE` holds the `vllm_v1` policy against it.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Case = dict[str, Any]

MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"num_key_value_heads": 1, "max_position_embeddings": 4096},
}
SAMPLED_TOKEN, EOS_TOKEN = 7, 2


def duplicates(seed: int) -> Case:
    """Draw a workload of few texts that many requests share, on blocks of 1 to 4 tokens and a small pool."""
    rng = random.Random(seed)
    block_size, length = rng.randint(1, 4), rng.choice([4, 8, 16, 32])
    num_requests = rng.randint(3, 24)
    texts = [
        [rng.randint(10, 11 + rng.randint(0, 4)) for _ in range(length)] for _ in range(rng.randint(1, 4))
    ]
    requests = []
    step = 0
    for number in range(num_requests):
        step += rng.choice([0, 0, 0, 1, 2, 4])
        prompt = rng.choice(texts)[: rng.choice([length, rng.randint(1, length)])]
        if rng.random() < 0.3:
            # What others generate goes on in a prompt, or another text does.
            prompt = prompt + [SAMPLED_TOKEN] * rng.randint(1, 6)
        if rng.random() < 0.2:
            prompt = prompt + rng.choice(texts)[: rng.randint(1, length)]
        request: Case = {
            **{"id": str(number), "arrival_step": step, "prompt": prompt},
            **{
                "max_tokens": rng.choice([1, rng.randint(1, 16), rng.randint(4, 32)]),
                "priority": rng.randint(0, 2),
            },
        }
        if rng.random() < 0.1:
            request["cache_salt"] = "salt"
        if rng.random() < 0.1:
            request["abort"] = [step + rng.randint(0, 8), rng.choice(["before", "during"])]
        requests.append(request)
    largest = max(-(-(len(one["prompt"]) + one["max_tokens"]) // block_size) for one in requests)
    config = {
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "block_size": block_size,
        "num_blocks": largest + rng.randint(0, largest),
        "max_num_seqs": rng.randint(1, 12),
        "max_num_batched_tokens": rng.choice([8, 16, 64, 256]),
        "max_model_len": 4 * length + 32,
        "prefix_caching": True,
    }
    config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    return {"kind": "duplicates", "config": config, "requests": requests}


def record(case: Case, folder: str) -> list[Case]:
    """Return the steps of a case."""
    # Imported here, since the workloads are drawn without it.
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    config = case["config"]
    size, num_blocks = config["block_size"], config["num_blocks"] + 1
    limits = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        policy=config["policy"],
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        watermark=0.0,
    )
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"]
        ),
        scheduler_config=limits,
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=config["prefix_caching"]),
    )
    # The platform may have set another one.
    vllm_config.cache_config.block_size = size
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    pool = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    scheduler = Scheduler(vllm_config, pool, StructuredOutputManager(vllm_config), size)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(size, sha256)
    coming, given, live = list(case["requests"]), {one["id"]: one for one in case["requests"]}, {}
    steps: list[Case] = []

    def abort(when: str) -> None:
        for name, request in list(live.items()):
            if given[name].get("abort") == [len(steps), when]:
                if request.status == RequestStatus.RUNNING:
                    is_prefill = request.num_computed_tokens < request.num_prompt_tokens
                    state = "prefill" if is_prefill else "decode"
                else:
                    state = "preempted" if request.status == RequestStatus.PREEMPTED else "waiting"
                aborted.append([name, when, state])
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                del live[name]

    while coming or live:
        aborted: list[list[str]] = []
        while coming and coming[0]["arrival_step"] <= len(steps):
            one = coming.pop(0)
            sampling = SamplingParams(max_tokens=one["max_tokens"], ignore_eos="eos_at" not in one)
            sampling.update_from_generation_config({}, EOS_TOKEN)
            live[one["id"]] = Request(
                one["id"],
                one["prompt"],
                sampling,
                None,
                arrival_time=one["arrival_step"] + int(one["id"]) / 1000,
                priority=one["priority"],
                cache_salt=one.get("cache_salt"),
                block_hasher=hasher,
            )
            scheduler.add_request(live[one["id"]])
        abort("before")
        plan = scheduler.schedule()
        counts = plan.num_scheduled_tokens
        # What was computed before: the count has been advanced by what is scheduled.
        scheduled = [[name, live[name].num_computed_tokens - count, count] for name, count in counts.items()]
        preempted = sorted(plan.preempted_req_ids or ())
        sampled = []
        for name in counts:
            request = live[name]
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])
            else:
                is_last = request.num_output_tokens + 1 == given[name].get("eos_at")
                sampled.append([EOS_TOKEN if is_last else given[name].get("token", SAMPLED_TOKEN)])
        abort("during")
        output = ModelRunnerOutput(
            list(counts), {name: place for place, name in enumerate(counts)}, sampled_token_ids=sampled
        )
        scheduler.update_from_output(plan, output)
        finished = [name for name in counts if name in live and live[name].is_finished()]
        for name in finished:
            del live[name]
        steps.append(
            {
                "scheduled": scheduled,
                "preempted": preempted,
                "finished": finished,
                **({"aborted": aborted} if aborted else {}),
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
                "free_blocks_after": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
        assert len(steps) < 10_000, "the workload does not end"
    return steps


def workloads(what: str) -> Iterator[Case]:
    """Yield the random workloads of so many seeds, or those of a file."""
    if what.isdecimal():
        yield from map(duplicates, range(int(what)))
    else:
        yield from map(json.loads, Path(what).read_text().splitlines())


def main(what: str) -> None:
    """Print the cases of `workloads` with their steps."""
    # vLLM logs to the standard output, so the cases keep it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for case in workloads(what):
            print(json.dumps({**case, "steps": record(case, folder)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
