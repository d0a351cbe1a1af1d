"""transformers' continuous batching, through its manager. Settings: model, dtype, slots, batch_tokens, cache_tokens, page."""

import torch
from talk import serve, settings
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def load():
    chosen = settings()
    model = AutoModelForCausalLM.from_pretrained(
        chosen["model"], dtype=getattr(torch, chosen["dtype"]), attn_implementation="sdpa"
    ).eval()
    page = chosen.get("page", 32)
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=chosen["cache_tokens"] // page,
        max_batch_tokens=chosen["batch_tokens"],
        max_requests_per_batch=chosen["slots"],
        allow_block_sharing=False,  # a repeated run would find its prompts
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=batching
    )
    with torch.inference_mode():  # its thread takes over the mode
        manager.start()
    runs = iter(range(1 << 30))

    def run(requests):
        turn = next(runs)
        names = [f"{turn}-{place}" for place in range(len(requests))]
        for name, item in zip(names, requests, strict=True):
            manager.add_request(item["prompt"], request_id=name, max_new_tokens=item["output"], eos_token_id=-1)
        answers = {}
        while len(answers) < len(requests):
            answer = manager.get_result(timeout=1)
            if answer is None:
                assert manager.is_running(), "the generation thread has ended"
            elif answer.is_finished():
                assert not answer.error, answer.error
                answers[answer.request_id] = list(answer.generated_tokens)
        return [answers[name] for name in names]

    return run


if __name__ == "__main__":
    serve(load, "transformers", "torch")
