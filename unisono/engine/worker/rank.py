"""Process of a rank other than 0: build a part of the model, then execute rank 0's commands.

``engine/worker/ranks.py`` starts it. It decides nothing: numbers of its build come from rank 0 or are agreed on
(``distributed/group.py``).
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from contextlib import suppress

import torch

from unisono.config import ResolvedConfig
from unisono.distributed.group import RankError
from unisono.distributed.processes import Gone, Rank
from unisono.engine.disaggregation.page_bytes import RankPages
from unisono.engine.worker.build import Build
from unisono.engine.worker.commands import ANSWERED, Command, FileOutcomes, decode
from unisono.engine.worker.ranks import close_carrying, open_carrying
from unisono.engine.worker.worker import Worker
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import UnisonoError


def main(socket: int, memory: int) -> None:
    """Serve as a rank; the arguments are descriptors made by rank 0."""
    logging.disable(logging.WARNING)  # rank 0 reports the same
    with suppress(Gone):
        rank = Rank(socket, memory)
        try:
            _serve(rank)
        except Gone:
            raise
        except BaseException as error:
            if not isinstance(error, UnisonoError):
                traceback.print_exc()
            rank.refuse(error)
            os._exit(1)
    os._exit(0)  # threads of libraries may wait for a device that never answers


@torch.inference_mode()
def _serve(rank: Rank) -> None:
    config: ResolvedConfig = rank.first["config"]
    open_carrying(rank, rank.memory, config.device, rank.first["store"])
    checkpoint = Checkpoint.open(config.requested.model, config.requested.quantization, config.requested.hf_overrides)
    build = Build(config, checkpoint, lambda stage, share: None, rank)
    worker = build.worker
    if config.requested.exchanges_pages:
        worker.page_bytes = RankPages(worker.store, rank.pages)
    gc.collect()
    gc.freeze()
    rank.exchange("ready")
    for data in rank.commands():
        command = decode(data)
        if isinstance(command, FileOutcomes):
            rank.answer(worker.answer(command))
        elif isinstance(command, ANSWERED):
            rank.answer(_attempted(worker, command))
        else:
            worker.execute(command)
        rank.memory.executed()
    for feature in build.request_features:
        feature.close()
    worker.close()
    build.close()
    close_carrying(rank)


def _attempted(worker: Worker, command: Command) -> bool | RankError:
    """Execute a command that may fail. Return True if its memory fits, or the reason of the failure."""
    try:
        worker.execute(command)
    except torch.OutOfMemoryError:
        return False
    except UnisonoError as error:
        return RankError.of(error)
    return True
