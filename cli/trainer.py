"""`ZenFlowCLI`: LightningCLI with a section `zenflow`, whose settings reach a strategy that is given by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zenflow import AutoTuner, StallMonitor, ZenFlowConfig, ZenFlowStrategy, internals

from .messages import in_our_words

# Without this, --help shows the fields of ZenFlowConfig without their documentation.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

T = TypeVar("T")


class ZenFlowArgumentParser(LightningArgumentParser):
    """A parser with short errors: the usage of a LightningCLI fills screens and hides the one line that counts."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing. `--help` still shows every option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Writes `message` to stderr and exits with status 2."""
        super().error(in_our_words(message), ex)


class ZenFlowCLI(LightningCLI):
    """A `LightningCLI` that adds the section `zenflow` and hands it to `--trainer.strategy zenflow`.

    Takes the arguments of `LightningCLI`. A strategy given by one of this package's names, or by class path without
    settings of its own, gets the section; the section beside any other strategy is an error, never ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        internals.check("lightning", "jsonargparse", command_line=True)  # not DeepSpeed, which --help does without
        kwargs.setdefault("parser_class", ZenFlowArgumentParser)
        super().__init__(*args, **kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--zenflow` and its fields."""
        super().add_default_arguments_to_parser(parser)
        # Typed as the class itself: the fields of a union such as Optional[ZenFlowConfig] are not in --help.
        parser.add_argument(
            "--zenflow",
            type=ZenFlowConfig,
            default=ZenFlowConfig(),
            help="Settings of --trainer.strategy zenflow, zenflow_stage_1, zenflow_stage_2, zenflow_stage_3 and"
            " zenflow_stage_3_offload",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the arguments and settles which settings the strategy gets."""
        super().parse_arguments(parser, args)
        self._or_exit(_give_settings_to_strategy, self.config.get(self.config.get("subcommand"), self.config))
        for refuses_in_words in (ZenFlowStrategy, AutoTuner, StallMonitor):
            parser.add_instantiator(self._create, refuses_in_words, subclasses=True)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Creates the Trainer; a ZenFlow strategy given by name is made from the section `zenflow`."""
        named = _named_strategy(self._get(self.config, "trainer").strategy)
        if named is not None and "strategy" not in kwargs:
            strategy_class, arguments = named
            kwargs["strategy"] = self._create(
                strategy_class, zenflow=self._get(self.config_init, "zenflow"), **arguments
            )
        return super().instantiate_trainer(**kwargs)

    def _create(self, wanted: type[T], *args: Any, **kwargs: Any) -> T:
        return self._or_exit(wanted, *args, **kwargs)

    def _or_exit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls `function`; a setting that it refuses ends the program with that one message instead of a traceback."""
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError, ImportError, MisconfigurationException) as error:
            self._parser(self.config.get("subcommand")).error(str(error), error)


def _give_settings_to_strategy(config: Namespace) -> None:
    """Checks the section `zenflow` against the strategy, and hands it to a strategy given by class path.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or the section would be ignored or contradicted.
    """
    section, default = _settings(config.zenflow), ZenFlowConfig()
    strategy = config.trainer.strategy
    if isinstance(strategy, Namespace) and issubclass(_import_class(strategy.class_path), ZenFlowStrategy):
        own = _settings(strategy.init_args.zenflow)
        # A config saved by an earlier run holds the same settings in both places.
        if default != own != section != default:
            raise ValueError(
                f"`zenflow` must be given once, got {_changed(section)} in the section `zenflow` and {_changed(own)} in"
                " `trainer.strategy.init_args.zenflow`. Remove one of them."
            )
        if section != default:
            strategy.init_args.zenflow = config.zenflow.clone()
    elif _named_strategy(strategy) is None:
        name = strategy.class_path if isinstance(strategy, Namespace) else strategy
        names = [known for known in StrategyRegistry if _named_strategy(known)]
        close = difflib.get_close_matches(str(name), names, n=1) if name not in StrategyRegistry else []
        if close:
            raise ValueError(f"`trainer.strategy` must be a registered name, got {name!r}. Did you mean {close[0]!r}?")
        if section != default:
            raise ValueError(
                f"`trainer.strategy` must be one of {', '.join(names)} beside the section `zenflow` with"
                f" {_changed(section)}, got {name!r}. Give `--trainer.strategy zenflow`, or remove the section."
            )


def _settings(section: Any) -> ZenFlowConfig:
    """A section `zenflow` as it was parsed; YAML may have anything in its place."""
    return ZenFlowConfig.from_mapping(section.as_dict() if isinstance(section, Namespace) else section)


def _named_strategy(strategy: Any) -> tuple[type[ZenFlowStrategy], dict[str, Any]] | None:
    """Class and arguments that the string `strategy` stands for, if that is a ZenFlow strategy; else `None`."""
    if not isinstance(strategy, str):
        return None
    if strategy in StrategyRegistry:
        entry = StrategyRegistry[strategy]
        found, arguments = entry["strategy"], entry["init_params"]
    else:
        # jsonargparse leaves a class path without options a string, which the Trainer would take for a name.
        found, arguments = _import_class(strategy), {}
    return (found, arguments) if issubclass(found, ZenFlowStrategy) else None


def _import_class(path: str) -> type:
    """The class at the dotted `path`, or `object` if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name, object) if module else object
    except ModuleNotFoundError:
        found = object
    return found if isinstance(found, type) else object


def _changed(zenflow: ZenFlowConfig) -> str:
    """The settings that differ from the defaults, as a person would write them."""
    default = ZenFlowConfig()
    names = [field.name for field in fields(zenflow) if getattr(zenflow, field.name) != getattr(default, field.name)]
    return ", ".join(f"{name}={getattr(zenflow, name)!r}" for name in names)
