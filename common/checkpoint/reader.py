"""The tensors of a checkpoint by official name, as values: mapped, read when asked for, dequantised a piece at a time.

Knows what is wanted, in what order, and how much of it is done; nothing of the model but names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch

from common.checkpoint.digests import load_digests
from common.checkpoint.headers import Headers, read_headers
from common.checkpoint.held import hold
from common.checkpoint.mapped import TORCH_DTYPES
from common.checkpoint.meter import LoadMeter
from common.checkpoint.part_reader import PartReader
from common.checkpoint.read_ahead import ReadAhead, Wanted
from common.checkpoint.read_options import Progress, ReadOptions
from common.checkpoint.stored_parts import StoredParts
from common.device.staging import Staging
from common.model.kernels import EightBitProducts
from common.model.matrices import Matrix
from common.model.weights import TensorPart

PIECE_VALUES = 16 << 20
"""Values that are read and dequantised at once; an expert is less. As float32 they are 64 MiB."""


class CheckpointReader(Mapping[str, torch.Tensor]):
    """Values by official name; quantised matrices come as float32, others as they are stored. A context manager.

    What is handed out may be a view on the mapped file: it is good until the next tensor or piece is asked for, and costs
    nothing more after it. Scales and other companions of a matrix are not tensors of their own here.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        on_progress: Progress | None = None,
        *,
        headers: Headers | None = None,
        wanted: Iterable[TensorPart] | None = None,
        options: ReadOptions | None = None,
        num_readers: int = 1,
        piece_values: int = PIECE_VALUES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`headers` are the checkpoint's when they are known already; `wanted` is what will be read, about in its order.

        `num_readers` threads will ask for pieces at a time.
        """
        options = options or ReadOptions()
        self._parts = StoredParts(read_headers(checkpoint_dir) if headers is None else headers)
        self._on_progress = on_progress
        self._piece_values = piece_values
        self._wanted = (
            [TensorPart(n) for n in self._parts.names] if wanted is None else list(wanted)
        )
        self._meter = LoadMeter(
            checkpoint_dir,
            slow_mb_per_s=options.slow_mb_per_s,
            num_readers=num_readers,
            clock=clock,
        )
        self._reader = PartReader(
            self._parts,
            digests=load_digests(checkpoint_dir) if options.verify_digests else {},
            meter=self._meter,
            on_read=self._count,
        )
        self._ahead: ReadAhead | None = None
        self._last: Generator[torch.Tensor] | None = None
        """What holds the tensor that was handed out last."""
        self._lock = threading.Lock()
        self._num_done = 0
        self.num_wanted_bytes = sum(map(self._parts.num_bytes, self._wanted))

    def __enter__(self) -> CheckpointReader:
        stored = (tensor for part in self._wanted for tensor in self._parts.tensors(part.name))
        for path in {tensor.path for tensor in stored}:
            self._reader.file(path)
        self._ahead = ReadAhead(
            Wanted(
                tuple((self._reader.file(path), span) for path, span in self._parts.touched(part)),
                self._parts.num_bytes(part),
            )
            for part in self._wanted
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._ahead is not None
        self._ahead.close()
        self._drop_last()
        self._reader.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        """All values of a tensor at once. One thread only."""
        self._drop_last()
        self._last = self._reader.pieces(TensorPart(name), largest=None)
        return next(self._last)

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        """Fill host memory with a part's values, with no copy in between; any thread may ask.

        False, with nothing done, where they are not stored as `room` has them or not side by side.
        """
        return self._reader.read_into(part, room)

    def pieces(self, part: TensorPart) -> Generator[torch.Tensor]:
        """Runs of a part's rows, in order. Only pages that hold them are read; digests are looked at for whole tensors.

        Any thread may ask; it must take all pieces or close the generator.
        """
        return self._reader.pieces(part, largest=self._piece_values)

    def is_quantised(self, name: str) -> bool:
        return len(self._parts.tensors(name)) > 1

    def held(
        self,
        part: TensorPart,
        *,
        dtype: torch.dtype,
        device: torch.device,
        staging: Staging,
        products: EightBitProducts | None = None,
    ) -> Matrix | None:
        """A part of a matrix as it is stored, for products in `dtype` or those of `products`; None when it is values."""
        matrix, *scales = self._parts.tensors(part.name)
        if not scales:
            return None
        window = self._parts.window(part)
        values_per_item = self._parts.values_per_item(matrix)
        return hold(
            self._parts.storage(matrix),
            window,
            self._reader.pieces(part, largest=self._piece_values, as_codes=True),
            self._reader.scales(part),
            self._parts.scale_part(matrix, scales[0], window),
            codes=torch.empty(
                (window.num_rows, window.num_columns_taken // values_per_item),
                dtype=TORCH_DTYPES[matrix.dtype],
                device=device,
            ),
            dtype=dtype,
            staging=staging,
            products=products,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the values, without reading them."""
        return self._parts.shape(name)

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes per second of what was read so far, dequantisation included."""
        return self._meter.mb_per_s

    def __contains__(self, name: object) -> bool:
        # A mapping's own way would read the tensor.
        return name in self._parts.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.names)

    def __len__(self) -> int:
        return len(self._parts.names)

    def _count(self, num_bytes: int, is_piece: bool) -> None:
        """Something was read; where it is only a part of what makes a piece, nobody is told yet."""
        self._meter.add(num_bytes)
        if self._ahead is not None:
            self._ahead.used(num_bytes)
        with self._lock:
            self._num_done += num_bytes
            if self._on_progress is not None and is_piece:
                self._on_progress(self._num_done, self.num_wanted_bytes)

    def _drop_last(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None
