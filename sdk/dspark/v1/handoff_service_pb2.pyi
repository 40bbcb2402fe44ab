from dspark.v1 import cache_pb2 as _cache_pb2
from dspark.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffKey(_message.Message):
    __slots__ = ("request_id", "epoch", "reservation_id", "prefill_generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reservation_id: str
    prefill_generation: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reservation_id: _Optional[str] = ..., prefill_generation: _Optional[str] = ...) -> None: ...

class NegotiateRequest(_message.Message):
    __slots__ = ("key", "capability", "contract", "num_tokens", "transfer_engines", "draft_length")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    contract: _cache_pb2.CacheContract
    num_tokens: int
    transfer_engines: _containers.RepeatedScalarFieldContainer[str]
    draft_length: int
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., contract: _Optional[_Union[_cache_pb2.CacheContract, _Mapping]] = ..., num_tokens: _Optional[int] = ..., transfer_engines: _Optional[_Iterable[str]] = ..., draft_length: _Optional[int] = ...) -> None: ...

class NegotiateResponse(_message.Message):
    __slots__ = ("transfer_engine", "memory", "page_ids", "slot", "engine_descriptor")
    TRANSFER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    transfer_engine: str
    memory: _containers.RepeatedCompositeFieldContainer[_cache_pb2.RegionMemory]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    engine_descriptor: bytes
    def __init__(self, transfer_engine: _Optional[str] = ..., memory: _Optional[_Iterable[_Union[_cache_pb2.RegionMemory, _Mapping]]] = ..., page_ids: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., engine_descriptor: _Optional[bytes] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "confidences")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("key", "capability", "manifest", "digest", "first_token_id", "first_logprob", "proposal", "has_drafter_state")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFTER_STATE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    manifest: _containers.RepeatedCompositeFieldContainer[_cache_pb2.ManifestEntry]
    digest: bytes
    first_token_id: int
    first_logprob: _types_pb2.TokenLogprob
    proposal: Proposal
    has_drafter_state: bool
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., manifest: _Optional[_Iterable[_Union[_cache_pb2.ManifestEntry, _Mapping]]] = ..., digest: _Optional[bytes] = ..., first_token_id: _Optional[int] = ..., first_logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., has_drafter_state: bool = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("accepted", "resend")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    resend: bool
    def __init__(self, accepted: bool = ..., resend: bool = ...) -> None: ...

class AbortHandoffRequest(_message.Message):
    __slots__ = ("key", "capability", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    reason: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortHandoffResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
