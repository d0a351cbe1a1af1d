"""Can this request ever be served? Checked once, when it is added; a refusal names field, value, limit and remedy."""

from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.geometry import ModelGeometry
from engine.request import NOT_WITH_BEAMS, Request, SamplingParams
from engine.reservation import max_tokens_held


def check_request(request: Request, config: SchedulerConfig, geometry: ModelGeometry) -> None:
    """`RequestRefused` for the first thing that makes a request impossible here."""
    params = request.params
    if not request.prompt_token_ids:
        raise RequestRefused("prompt", "0 tokens", "at least 1 token", "send a prompt")
    for name, width in (("n", params.n), ("beam_width", params.beam_width)):
        if width > config.max_slots:
            raise RequestRefused(name, width, f"at most {config.max_slots}: each takes a slot", "lower it")
    budget = config.max_num_batched_tokens
    if params.beam_width > budget and config.scheduling == "continuous":
        limit = f"at most {budget}: beams go on together, and a step has so many tokens"
        raise RequestRefused("beam_width", params.beam_width, limit, "lower it, or serve with a larger token_budget")
    if params.max_tokens > max(config.max_model_len, SamplingParams().max_tokens):  # the default is never refused
        raise RequestRefused("max_tokens", params.max_tokens, f"at most {config.max_model_len}: the model's length", "lower it")
    _check_room(request, config, geometry)
    if params.beam_width:
        _check_beams(params)
        if request.output_token_ids:
            raise RequestRefused(
                "output", f"{len(request.output_token_ids)} tokens", "none", "begin a beam search at its prompt"
            )
    if params.allowed_token_ids and set(params.allowed_token_ids) <= set(params.banned_token_ids):
        num_allowed = len(params.allowed_token_ids)
        raise RequestRefused("allowed_token_ids", f"{num_allowed} ids", "some that are not banned", "leave one of them out")
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("prompt", request.output_token_ids),
        ("logit_bias", tuple(token_id for token_id, _ in params.logit_bias)),
        ("banned_token_ids", params.banned_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= geometry.vocab_size):
            worst = next(token_id for token_id in token_ids if not 0 <= token_id < geometry.vocab_size)
            raise RequestRefused(name, f"token id {worst}", f"ids 0..{geometry.vocab_size - 1}", "use this model's tokenizer")


def _check_room(request: Request, config: SchedulerConfig, geometry: ModelGeometry) -> None:
    """The prompt and, unless none is wanted, one token of output fit into the model and the KV cache."""
    num_prompt, limit = len(request.prompt_token_ids), max_tokens_held(request, config)
    room = limit if request.params.max_tokens == 0 else limit - 1
    if num_prompt <= room:
        return
    if limit < config.max_model_len:
        beams = f" for {request.params.beam_width} beams" if request.params.beam_width else ""
        what, remedy = f"the whole KV cache holds {limit}{beams}", "shorten the prompt, or serve with more kv_blocks"
    else:
        what, remedy = f"max_model_len is {limit} with the output", "shorten the prompt"
        if config.max_model_len < geometry.max_model_len:
            remedy += ", or serve with a larger max_model_len"
    raise RequestRefused("prompt", f"{num_prompt} tokens", f"at most {room}: {what}", remedy)


def _check_beams(params: SamplingParams) -> None:
    """Beam search takes the model's own distribution."""
    neutral = SamplingParams()
    for name in NOT_WITH_BEAMS:
        if getattr(params, name) != getattr(neutral, name):
            # Not the other way round: some of them hold what a user wrote.
            raise RequestRefused("beam_width", params.beam_width, f"not with {name}", "leave one of them out")
