"""Answer prompts by vLLM in this process and print, as JSON, the tokens and which kernels ran the experts."""

import json
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    import kpt_core

    folder, options = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(folder, max_model_len=128, **options)
    prompts = [
        {"prompt_token_ids": [(3 * i + 7 * j) % 90 for j in range(length)]} for i, length in enumerate((5, 17, 40))
    ]
    answers = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    kernels = {each.identity: each.calls for each in kpt_core.counts() if each.op == "moe.experts"}
    print(json.dumps({"tokens": tokens, "kernels": kernels}))
