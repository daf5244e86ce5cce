"""One way of running a model: which implementation serves its experts, and which kernels serve KPT's ops."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError

if TYPE_CHECKING:
    from torch import nn

#: transformers' own implementations of experts, and KPT's.
KPT = "kpt"
IMPLEMENTATIONS = (KPT, "eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of running a model.

    Attributes:
        name: what the user wrote.
        experts: the implementation of transformers' experts modules.
        choices: pairs of an op's name, or `*`, and the backend, kernel or `reference` that must serve it.
    """

    name: str = KPT
    experts: str = KPT
    choices: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "Arm":
        """Read `eager`, `nvidia`, `reference`, `package.module:kernel`, `moe.experts=NAME`, or several with commas.

        Raises:
            CliError: a malformed pair, or a kernel for experts that transformers serves itself.
        """
        if text is None:
            return cls()
        experts, choices = [], []
        for part in filter(None, map(str.strip, text.split(","))):
            op, separator, name = map(str.strip, part.rpartition("="))
            if separator and not (op and name):
                raise CliError(f"{part!r} is not of the form NAME or OP=NAME, for instance moe.experts=reference")
            if not separator and name in IMPLEMENTATIONS:
                experts.append(name)
            else:
                choices.append((op or "*", name))
        if len(set(experts)) > 1 or (choices and experts not in ([], [KPT])):
            raise CliError(
                f"{text!r} asks for several implementations of experts; expected one of {', '.join(IMPLEMENTATIONS)}, "
                "or kernels, which serve the experts under kpt"
            )
        if not (experts or choices):
            raise CliError(f"{text!r} names nothing; expected a backend, a kernel, reference, or an implementation")
        # The innermost choice wins, and one for an op counts more than one for all.
        choices.sort(key=lambda choice: choice[0] != "*")
        return cls(name=text, experts=experts[0] if experts else KPT, choices=tuple(choices))

    @contextmanager
    def running(self, model: "nn.Module") -> Iterator[None]:
        """Run the model this way inside the block; afterwards it is as it was.

        Raises:
            UnknownNameError: no such backend, kernel or op is installed.
        """
        import kpt_core

        configs = _experts_configs(model)
        if configs and self.experts == KPT:
            import kpt_moe.transformers  # noqa: F401  registers the implementation
        before = [(config, config._experts_implementation_internal) for config in configs]
        with ExitStack() as stack:
            for op, name in self.choices:
                stack.enter_context(kpt_core.use(name, op=op))
            try:
                for config in configs:
                    config._experts_implementation_internal = self.experts
                yield
            finally:
                for config, implementation in before:
                    config._experts_implementation_internal = implementation


#: What the float64 reference runs by: transformers' own loop over experts, and the references of KPT's ops.
ORACLE = Arm(name="float64", experts="eager", choices=(("*", "reference"),))


def _experts_configs(model: "nn.Module") -> list[Any]:
    from kpt_moe.rewrites import is_transformers_experts

    found = {id(m.config): m.config for m in model.modules() if is_transformers_experts(m)}
    return list(found.values())
