"""The folder of a run. Only this package reads and writes its files.

A run can be resumed, on any machine, from ``config.yaml``, ``metrics.jsonl`` and ``checkpoint.pt``. The weights
(``last``, ``best`` and ``averaged.safetensors``) are exported from the checkpoint.
"""

from bullettrain.run_folder.environment import environment
from bullettrain.run_folder.folder import CHECKPOINT, Checkpoint, RunFolder, try_folder
from bullettrain.run_folder.log import SHARES, Floats, RunLog, Samples, ScoredBatch, Table, read_batch
from bullettrain.run_folder.weights import (
    WEIGHTS,
    Metadata,
    NetworkMetadata,
    RunError,
    Weights,
    pack_weights,
    preferred,
    read_weights,
    weights_in,
)
from bullettrain.run_folder.writer import CheckpointWriter

__all__ = [
    "CHECKPOINT",
    "SHARES",
    "WEIGHTS",
    "Checkpoint",
    "CheckpointWriter",
    "Floats",
    "Metadata",
    "NetworkMetadata",
    "RunError",
    "RunFolder",
    "RunLog",
    "Samples",
    "ScoredBatch",
    "Table",
    "Weights",
    "environment",
    "pack_weights",
    "preferred",
    "read_batch",
    "read_weights",
    "try_folder",
    "weights_in",
]
