"""Calls of ``LLM`` that change its weights and hold its passes, for reinforcement learning. Names are SGLang's."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unisono.engine.loop import EngineLoop, Inbox
from unisono.frontend.classifier import Classifier
from unisono.frontend.pooling import Pooling
from unisono.frontend.scores import NO_UPDATE
from unisono.types import BadRequest, CheckpointError, ConfigError, EngineRequest
from unisono.types.lora import LoRARequest
from unisono.types.shared_tensor import SharedTensor

SHARED_MEMORY = Path("/dev/shm")
"""Directory of files in shared memory, where Linux has them."""


COLLECTIVE = (
    "update_weights", "update_weights_from_tensor", "update_weights_from_distributed", "init_weights_update_group",
    "destroy_weights_update_group", "load_lora_adapter_from_tensors", "pause_generation", "continue_generation",
    "sleep", "wake_up", "reset_prefix_cache",
)  # fmt: skip
"""Methods that :meth:`WeightCalls.collective_rpc` calls by name."""


class WeightCalls:
    """The part of ``LLM`` that changes weights. Each method returns once all ranks have done it."""

    loop: EngineLoop[Any]
    _classifier: Classifier | None
    _pooling: Pooling
    _loading: threading.Lock
    _adapters: dict[str, LoRARequest]
    _pushed_adapters: dict[str, tempfile.TemporaryDirectory[str]]

    def update_weights(
        self, directory: str = "", draft_directory: str = "", version: str | None = None
    ) -> dict[str, Any]:
        """Replace the weights between two passes; see :meth:`unisono.engine.engine.Engine.update_weights`."""
        if directory:
            self._check_updatable()
        return self.loop.call(lambda engine: engine.update_weights(directory, draft_directory, version))

    def update_weights_from_tensor(
        self,
        named_tensors: Mapping[str, torch.Tensor | SharedTensor]
        | Iterable[tuple[str, torch.Tensor | SharedTensor]]
        | Sequence[str],
        version: str | None = None,
        draft: bool = False,
    ) -> dict[str, Any]:
        """Replace the weights of these names, by the checkpoint's names; the others stay.

        named_tensors: tensors in any dtype of checkpoints, or paths of safetensors files with them. Tensors are copied
        once into a file of shared memory, which all ranks read; those that another process of this host described by
        :func:`unisono.distributed.cuda_ipc.share` are read where they are. A slice has bounds in its name:
        ``lm_head.weight[0:128]``, ``model.norm.weight[:, 0:64]``. version: as for :meth:`update_weights`. draft: the
        drafter's weights, by the names of its checkpoint. Raises CheckpointError, with the old weights in place, for a
        tensor without a place in the model.
        """
        self._check_updatable()
        entries = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        files = [entry for entry in entries if isinstance(entry, str)]
        named = {entry[0]: entry[1] for entry in entries if not isinstance(entry, str)}
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in named.items() if not isinstance(value, torch.Tensor)}
        more: dict[str, Any] = {"handles": others, "version": version, "draft": draft}
        if not tensors:
            return self._command("update_weights_from_tensor", files=files, **more)
        directory = tempfile.mkdtemp(prefix="unisono-weights-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        try:
            file = str(Path(directory, "weights.safetensors"))
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, file)
            return self._command("update_weights_from_tensor", files=[*files, file], **more)
        finally:
            shutil.rmtree(directory)

    def load_lora_adapter_from_tensors(
        self, lora_name: str, tensors: Mapping[str, torch.Tensor], config_dict: Mapping[str, Any]
    ) -> LoRARequest:
        """Serve an adapter of these tensors, in place of one of that name; returns the request that names it.

        tensors: A and B of each module in a float dtype, by PEFT's names in ``adapter_model.safetensors``. config_dict:
        of ``adapter_config.json``; sets become lists. They are copied to shared memory. Requests that run go on with
        the adapter they began with; cached prefixes of the old one are not used for the new one. Raises BadRequest with
        the old adapter in place.
        """
        directory = tempfile.TemporaryDirectory(
            prefix="unisono-adapter-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        )
        held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(held, Path(directory.name, "adapter_model.safetensors"))
        Path(directory.name, "adapter_config.json").write_text(json.dumps(dict(config_dict), default=sorted))
        with self._loading:
            known = self._adapters.get(lora_name)
            numbers = [0, *(one.lora_int_id for one in self._adapters.values())]
            request = LoRARequest(lora_name, known.lora_int_id if known else max(numbers) + 1, directory.name)
            try:
                arguments = {"name": lora_name, "directory": directory.name, "again": True}
                self.loop.call(lambda engine: engine.command("load_adapter", arguments))
            except (CheckpointError, ConfigError) as error:
                raise BadRequest(f"tensors: {error}", "tensors") from None
            self._adapters[lora_name] = request
            self._pushed_adapters[lora_name] = directory  # read again if host memory has dropped it
        return request

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int,
        group_name: str = "weight_update_group", backend: str = "nccl", timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Join a trainer's process group; the engine's rank r is rank ``rank_offset`` + r there.

        The trainer is rank 0: :class:`unisono.distributed.weight_group.WeightGroup`. world_size: the trainer and all
        ranks. timeout: seconds; None: 100. Raises ConfigError if the members do not meet.
        """
        self._command(
            "init_weights_update_group", master_address=master_address, master_port=master_port,
            rank_offset=rank_offset, world_size=world_size, group_name=group_name, backend=backend, timeout=timeout,
        )  # fmt: skip

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group", version: str | None = None, draft: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Receive tensors that the trainer sends in this order, and write them over the weights of these names.

        dtypes: torch's names without ``torch.``. draft, errors: as of
        :meth:`update_weights_from_tensor`.
        """
        self._check_updatable()
        return self._command(
            "update_weights_from_distributed", names=names, dtypes=dtypes, shapes=shapes, group_name=group_name,
            version=version, draft=draft,
        )  # fmt: skip

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave a group. Raises ConfigError if there is none of this name."""
        self._command("destroy_weights_update_group", group_name=group_name)

    def pause_generation(self) -> None:
        """Launch no more passes. Requests stay where they are, and calls that wait for them go on waiting."""
        self._command("pause", paused=True)

    def continue_generation(self) -> None:
        """Launch passes again."""
        self._command("pause", paused=False)

    def sleep(self, level: int = 1) -> dict[str, Any]:
        """Free the memory of weights and KV cache until :meth:`wake_up`; needs ``enable_sleep_mode=True``.

        level: 1: weights go to host memory; 2: the target's weights are dropped. Requests that run are computed again
        after the wake. Returns freed bytes by tag. Raises ConfigError if the engine cannot sleep.
        """
        return self._command("sleep", level=level)

    def wake_up(self, tags: Sequence[str] | None = None, reload: bool = True) -> dict[str, Any]:
        """Get the memory back at the same addresses.

        tags: ``weights`` and ``kv_cache``, weights first; None: both. reload: read dropped weights from their
        directory; False: an update of all weights follows before ``kv_cache`` wakes. Raises ConfigError with the rest
        asleep if memory or weights are missing.
        """
        return self._command("wake_up", tags=None if tags is None else list(tags), reload=reload)

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """SGLang's name of :meth:`sleep` at level 1. tags: ``["kv_cache"]`` releases the KV cache alone.

        Raises ConfigError as :meth:`sleep`, and for weights without the KV cache.
        """
        if unknown := sorted(set(tags or ()) - {"weights", "kv_cache"}):
            raise ConfigError(f"tag {unknown[0]!r}: give weights or kv_cache.")
        if tags and "kv_cache" not in tags:
            raise ConfigError(f"tags={list(tags)}: weights are released with the kv_cache; name both.")
        done = self.sleep(1)
        if tags and set(tags) == {"kv_cache"}:
            self.wake_up(["weights"])
        return done

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """SGLang's name of :meth:`wake_up`."""
        return self.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """True while a part of the memory sleeps."""
        return bool(self.loop.engine.sleep.asleep)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of COLLECTIVE by name, as vLLM's method of this name does with those of its workers.

        Returns a list of the one result: all ranks take part in each call. Raises BadRequest for another method, for a
        function (ranks take commands, not code), and for a timeout (a call ends between two passes).
        """
        if not isinstance(method, str) or method not in COLLECTIVE:
            shown = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
            raise BadRequest(f"method={shown!r} is not called on ranks; these are: {', '.join(COLLECTIVE)}.", "method")
        if timeout is not None:
            raise BadRequest(
                f"timeout={timeout}: calls end between two passes, without a limit; leave it out.", "timeout"
            )
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def _submit(self, requests: Sequence[EngineRequest]) -> Inbox:
        """Add requests to the engine. Raises BadRequest while it sleeps, since this thread would wait for ever."""
        self.loop.engine.sleep.check_awake()
        return self.loop.submit(requests)

    def _command(self, name: str, **arguments: Any) -> Any:
        return self.loop.call(lambda engine: engine.command(name, arguments))

    def _check_updatable(self) -> None:
        if self._classifier is not None or self._pooling.layers:
            raise BadRequest(NO_UPDATE)
