"""Serve requests with vLLM in an environment of its own: JSON lines in, JSON lines out.

Each line asks for the continuation of some prompts, {"prompts": [[token ids]], "max_tokens": [...]}, and is
answered by {"tokens": [[token ids]], "seconds": ...}. A first line, {"version": ...}, says that the engine is
up. Nothing of this project is imported, and the process ends with its input.
"""

import json
import os
import sys
import time

# Read when vLLM is imported. Without a second process there is nothing between it and its own model.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    folder, num_seqs, num_batched = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # vLLM logs to the standard output, so the answers keep it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    llm = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say(version=vllm.__version__)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = [
            vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens)
            for max_tokens in asked["max_tokens"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        say(tokens=[list(output.outputs[0].token_ids) for output in outputs], seconds=seconds)


if __name__ == "__main__":
    main()
