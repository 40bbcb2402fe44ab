from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Retention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETENTION_UNSPECIFIED: _ClassVar[Retention]
    RETENTION_PAGED: _ClassVar[Retention]
    RETENTION_RING: _ClassVar[Retention]
RETENTION_UNSPECIFIED: Retention
RETENTION_PAGED: Retention
RETENTION_RING: Retention

class CacheRegion(_message.Message):
    __slots__ = ("name", "layer_ids", "ratio", "row_width", "dtype", "retention", "window_rows", "tail_group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ROWS_FIELD_NUMBER: _ClassVar[int]
    TAIL_GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    ratio: int
    row_width: int
    dtype: str
    retention: Retention
    window_rows: int
    tail_group: int
    def __init__(self, name: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., ratio: _Optional[int] = ..., row_width: _Optional[int] = ..., dtype: _Optional[str] = ..., retention: _Optional[_Union[Retention, str]] = ..., window_rows: _Optional[int] = ..., tail_group: _Optional[int] = ...) -> None: ...

class CacheContract(_message.Message):
    __slots__ = ("model_fingerprint", "regions", "drafter_fingerprint")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    regions: _containers.RepeatedCompositeFieldContainer[CacheRegion]
    drafter_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[CacheRegion, _Mapping]]] = ..., drafter_fingerprint: _Optional[str] = ...) -> None: ...

class RegionMemory(_message.Message):
    __slots__ = ("name", "total_bytes", "layer_stride_bytes", "block_stride_bytes", "rows_per_block", "row_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    rows_per_block: int
    row_bytes: int
    def __init__(self, name: _Optional[str] = ..., total_bytes: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., rows_per_block: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class ManifestEntry(_message.Message):
    __slots__ = ("region", "first_row", "num_rows", "num_bytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    region: str
    first_row: int
    num_rows: int
    num_bytes: int
    def __init__(self, region: _Optional[str] = ..., first_row: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...
