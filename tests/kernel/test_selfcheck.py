"""The check of the kernels at hand, as a GPU would have it: Triton, under its interpreter, and kernels that are wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import dispatch, reference, selfcheck

CPU = torch.device("cpu")
FORMATS = [selfcheck.FLOAT32, *selfcheck.ON_A_GPU]
each_format = pytest.mark.parametrize("form", FORMATS, ids=[form.name or "float32" for form in FORMATS])


@each_format
def test_triton_is_as_near_to_the_reference_as_it_must_be(form: selfcheck.Format) -> None:
    # numpy, which interprets, has no bfloat16 to multiply.
    in_float16 = form._replace(
        **{name: torch.float16 for name in ("dtype", "kv_dtype") if getattr(form, name) is torch.bfloat16}
    )

    error = selfcheck.error_of(dispatch._triton_attention(), CPU, in_float16)

    assert isinstance(error, float), error
    assert error <= form.limit / 2


def test_triton_layers_are_as_near_to_the_twins_as_they_must_be() -> None:
    error = selfcheck.layer_error(dispatch._triton_layers(), CPU)

    assert isinstance(error, float), error
    assert error <= selfcheck.FLOAT32.limit / 10


@each_format
def test_a_key_that_is_not_seen_is_found(form: selfcheck.Format) -> None:
    def short(*arguments: Any, **options: Any) -> torch.Tensor:
        *others, contexts = arguments
        return reference.paged_attention(*others, contexts - (contexts > 1).int(), **(options | {"plan": None}))

    error = selfcheck.error_of(replace(dispatch.REFERENCE, paged_attention=short), CPU, form)

    assert isinstance(error, float), error
    assert error > form.limit


def test_an_error_is_told_in_one_line() -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image\nfor this GPU")

    broken = replace(dispatch.REFERENCE, paged_attention=fail)

    assert selfcheck.error_of(broken, CPU, selfcheck.FLOAT32) == "no kernel image"
