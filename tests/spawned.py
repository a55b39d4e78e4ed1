# SPDX-License-Identifier: Apache-2.0
"""A user's script: an ``LLM`` with vLLM's defaults. See ``harness.run_spawned``."""

import json
import sys


def main() -> None:
    from vllm import LLM

    from tests.harness import ANSWERS, sampling_params, to_output

    job = json.load(sys.stdin)
    llm = LLM(job["model"], **job["options"])
    done = llm.generate(
        [{"prompt_token_ids": p} for p in job["prompts"]],
        sampling_params(job["tokens"]),
        use_tqdm=False,
    )
    answers = [to_output(output) for output in done]
    print("\n" + ANSWERS + json.dumps([a[:3] for a in answers]), flush=True)


if __name__ == "__main__":  # engines are spawned: they import this module again
    main()
