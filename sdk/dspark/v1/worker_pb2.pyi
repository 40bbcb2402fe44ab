from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerInfo(_message.Message):
    __slots__ = ("version", "role", "generation", "model_fingerprint", "model", "max_context_length", "vocab_size", "draft_length", "num_pages", "num_free_pages", "num_slots", "num_free_slots", "queued_requests", "running_requests", "num_leases", "draining", "computes_prompts", "uptime_s", "details", "transfer_engines", "num_quarantined_pages", "safe_to_delete", "mesh", "memory")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    SAFE_TO_DELETE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    version: str
    role: str
    generation: str
    model_fingerprint: str
    model: str
    max_context_length: int
    vocab_size: int
    draft_length: int
    num_pages: int
    num_free_pages: int
    num_slots: int
    num_free_slots: int
    queued_requests: int
    running_requests: int
    num_leases: int
    draining: bool
    computes_prompts: bool
    uptime_s: float
    details: _containers.ScalarMap[str, str]
    transfer_engines: _containers.RepeatedScalarFieldContainer[str]
    num_quarantined_pages: int
    safe_to_delete: bool
    mesh: WorkerMesh
    memory: _containers.RepeatedCompositeFieldContainer[RankMemory]
    def __init__(self, version: _Optional[str] = ..., role: _Optional[str] = ..., generation: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., draft_length: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_free_slots: _Optional[int] = ..., queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., num_leases: _Optional[int] = ..., draining: bool = ..., computes_prompts: bool = ..., uptime_s: _Optional[float] = ..., details: _Optional[_Mapping[str, str]] = ..., transfer_engines: _Optional[_Iterable[str]] = ..., num_quarantined_pages: _Optional[int] = ..., safe_to_delete: bool = ..., mesh: _Optional[_Union[WorkerMesh, _Mapping]] = ..., memory: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ...) -> None: ...

class WorkerMesh(_message.Message):
    __slots__ = ("dp", "tp", "ep", "num_ranks", "device")
    DP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    dp: int
    tp: int
    ep: int
    num_ranks: int
    device: str
    def __init__(self, dp: _Optional[int] = ..., tp: _Optional[int] = ..., ep: _Optional[int] = ..., num_ranks: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ("rank", "device", "claims")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    device: str
    claims: _containers.RepeatedCompositeFieldContainer[MemoryClaim]
    def __init__(self, rank: _Optional[int] = ..., device: _Optional[str] = ..., claims: _Optional[_Iterable[_Union[MemoryClaim, _Mapping]]] = ...) -> None: ...

class MemoryClaim(_message.Message):
    __slots__ = ("owner", "kind", "num_bytes")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    owner: str
    kind: str
    num_bytes: int
    def __init__(self, owner: _Optional[str] = ..., kind: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...
