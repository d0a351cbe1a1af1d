"""transformers' `generate` on static batches, padded on the left, each to its longest output. Settings: model, dtype, batch."""

import torch
from talk import serve, settings
from transformers import AutoModelForCausalLM


def load():
    chosen = settings()
    model = AutoModelForCausalLM.from_pretrained(
        chosen["model"], dtype=getattr(torch, chosen["dtype"]), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def one_batch(requests):
        width = max(len(item["prompt"]) for item in requests)
        steps = max(item["output"] for item in requests)
        rows = [[0] * (width - len(item["prompt"])) + item["prompt"] for item in requests]
        seen = [[0] * (width - len(item["prompt"])) + [1] * len(item["prompt"]) for item in requests]
        made = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(seen),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
        )
        return [made[row, width : width + item["output"]].tolist() for row, item in enumerate(requests)]

    def run(requests):
        size = chosen["batch"]
        return [tokens for at in range(0, len(requests), size) for tokens in one_batch(requests[at : at + size])]

    return run


if __name__ == "__main__":
    serve(load, "transformers", "torch")
