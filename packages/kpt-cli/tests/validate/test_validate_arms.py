"""What `--use` accepts, and that a model is as it was after it ran one way."""

import pytest
from faulty_kernels import mixtral

from kpt_cli.errors import CliError
from kpt_cli.validate.arms import Arm


@pytest.mark.parametrize(
    ("text", "experts", "choices"),
    [
        (None, "kpt", ()),
        ("eager", "eager", ()),
        ("kpt", "kpt", ()),
        ("reference", "kpt", (("*", "reference"),)),
        ("kpt, moe.experts=a.b:c , nvidia", "kpt", (("*", "nvidia"), ("moe.experts", "a.b:c"))),
    ],
)
def test_forms(text, experts, choices):
    arm = Arm.parse(text)
    assert (arm.experts, arm.choices) == (experts, tuple(sorted(choices, key=lambda choice: choice[0] != "*")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("moe.experts=", "'moe.experts=' is not of the form NAME or OP=NAME"),
        ("eager,kpt", "several implementations of experts"),
        ("eager,nvidia", "several implementations of experts"),
        (",", "names nothing"),
    ],
)
def test_slips(text, said):
    with pytest.raises(CliError, match=said):
        Arm.parse(text)


def test_a_model_is_as_it_was_even_after_an_error():
    model = mixtral()
    before = model.config._experts_implementation
    inside = []

    def fail():
        with Arm.parse("eager").running(model):
            inside.append(model.config._experts_implementation)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == ["eager"]
    assert model.config._experts_implementation == before
