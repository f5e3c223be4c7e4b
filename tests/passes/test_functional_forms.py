"""Which writing operators have a pure form: all of PyTorch's, classified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchgen
from torchgen.gen import parse_native_yaml
from torchgen.model import NativeFunction, SchemaKind
from torchgen.native_function_generation import pre_group_native_functions

from tarry.ir.operators import operator, overload
from tarry.passes.functional_forms import FunctionalForm, functional_form

WRITING = (SchemaKind.inplace, SchemaKind.out, SchemaKind.mutable)

# Operators that write elements and have no pure form, by reason. Nodes of these stay as they are, marked as kept.
NONE = {
    "composite: recorded as the operators they are made of": {
        "dropout_",
        "feature_dropout_",
        "alpha_dropout_",
        "feature_alpha_dropout_",
        "fill_diagonal_",
        "fused_moving_avg_obs_fake_quant",
        "requires_grad_",
    },
    "PyTorch has none": {
        "_sobol_engine_ff_",
        "_sobol_engine_scramble_",
        "_sobol_engine_initialize_state_",
        "_fill_mem_eff_dropout_mask_",
        "_cummax_helper",
        "_cummin_helper",
        "_flash_attention_forward_no_dropout_inplace",
        "_cudnn_attention_forward_no_dropout_inplace",
        "fbgemm_linear_fp16_weight_fp32_activation.out",
        "fbgemm_linear_fp16_weight.out",
    },
    "under a name of its own": {"adaptive_avg_pool3d_backward.grad_input", "_slow_conv2d_backward.grad_input"},
    "writes to its inputs and to out= as well": {
        "_native_batch_norm_legit.out",
        "_batch_norm_with_update.out",
        "rrelu_with_noise.out",
        "_fused_moving_avg_obs_fq_helper.out",
        "_amp_foreach_non_finite_check_and_unscale.out",
        "_amp_update_scale.out",
        "_fused_adam.out",
        "_fused_adam.tensor_lr_out",
        "_fused_adamw.out",
        "_fused_adamw.tensor_lr_out",
        "_fused_sgd.out",
        "_fused_sgd.tensor_lr_out",
        "_fused_adagrad.out",
        "_fused_adagrad.tensor_lr_out",
    },
}


@pytest.fixture(scope="module")
def functions() -> list[NativeFunction]:
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    return list(parsed.native_functions)


def name_of(function: NativeFunction) -> str:
    return f"aten::{function.func.name}"


def test_every_writing_operator_has_a_pure_form_or_a_reason(functions: list[NativeFunction]) -> None:
    without = set()
    found = 0
    for function in functions:
        if function.func.kind() in WRITING:
            if functional_form(name_of(function)) is not None:
                found += 1
            elif torch.Tag.inplace_view not in overload(name_of(function)).tags:
                without.add(str(function.func.name))
    reasons = set().union(*NONE.values())
    assert without - reasons == set()  # a new one: find out why
    assert found > 1300


def test_forms_are_those_that_torchgen_groups(functions: list[NativeFunction]) -> None:
    compared = 0
    for group in pre_group_native_functions(functions).values():
        pure = group.get(SchemaKind.functional)
        for kind, function in group.items():
            form = functional_form(name_of(function)) if kind in WRITING else None
            if pure is not None and form is not None:
                assert form.op == name_of(pure)
                compared += 1
    assert compared > 1000


def test_forms_take_the_arguments_of_the_same_name_and_type(functions: list[NativeFunction]) -> None:
    for function in functions:
        form = functional_form(name_of(function)) if function.func.kind() in WRITING else None
        if form is None:
            continue
        writing, pure = operator(name_of(function)), operator(form.op)
        assert not pure.is_mutable
        for index, argument in zip(form.args, pure.arguments, strict=True):
            if index is not None:
                taken = writing.arguments[index]
                assert (taken.name, taken.type, taken.out) == (argument.name, argument.type, False)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten::add_.Tensor", FunctionalForm("aten::add.Tensor", (0, 1, 2))),
        ("aten::add.out", FunctionalForm("aten::add.Tensor", (0, 1, 2))),
        ("aten::max.dim_max", FunctionalForm("aten::max.dim", (0, 1, 2))),
        ("aten::polygamma_", FunctionalForm("aten::polygamma", (1, 0))),
        ("aten::zeros.out", FunctionalForm("aten::zeros", (0, None, None, None, None))),
        ("aten::_fused_adam_", FunctionalForm("aten::_fused_adam", tuple(range(15)))),
        ("aten::t_", None),  # changes sizes and strides of a tensor, not what a storage holds
        ("aten::add.Tensor", None),  # pure already
    ],
)
def test_examples(op: str, expected: FunctionalForm | None) -> None:
    assert functional_form(op) == expected
