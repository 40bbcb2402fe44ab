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

class EngineDescriptor(_message.Message):
    __slots__ = ("name", "endpoint", "region_addresses", "probe_address", "device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REGION_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: bytes
    region_addresses: _containers.RepeatedScalarFieldContainer[int]
    probe_address: int
    device: str
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[bytes] = ..., region_addresses: _Optional[_Iterable[int]] = ..., probe_address: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("prefill_generation", "prefill_address", "contract", "transfer_engines")
    PREFILL_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINES_FIELD_NUMBER: _ClassVar[int]
    prefill_generation: str
    prefill_address: str
    contract: _cache_pb2.CacheContract
    transfer_engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefill_generation: _Optional[str] = ..., prefill_address: _Optional[str] = ..., contract: _Optional[_Union[_cache_pb2.CacheContract, _Mapping]] = ..., transfer_engines: _Optional[_Iterable[str]] = ...) -> None: ...

class MeetResponse(_message.Message):
    __slots__ = ("decode_generation", "engine", "memory", "transfer_engines", "drafter_difference")
    DECODE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    decode_generation: str
    engine: EngineDescriptor
    memory: _containers.RepeatedCompositeFieldContainer[_cache_pb2.RegionMemory]
    transfer_engines: _containers.RepeatedScalarFieldContainer[str]
    drafter_difference: str
    def __init__(self, decode_generation: _Optional[str] = ..., engine: _Optional[_Union[EngineDescriptor, _Mapping]] = ..., memory: _Optional[_Iterable[_Union[_cache_pb2.RegionMemory, _Mapping]]] = ..., transfer_engines: _Optional[_Iterable[str]] = ..., drafter_difference: _Optional[str] = ...) -> None: ...

class NegotiateRequest(_message.Message):
    __slots__ = ("key", "capability", "num_tokens", "sender_address", "decode_generation", "transfer_engine")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    num_tokens: int
    sender_address: str
    decode_generation: str
    transfer_engine: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., sender_address: _Optional[str] = ..., decode_generation: _Optional[str] = ..., transfer_engine: _Optional[str] = ...) -> None: ...

class NegotiateResponse(_message.Message):
    __slots__ = ("page_ids", "slot", "generation")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    generation: str
    def __init__(self, page_ids: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., generation: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "confidences")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...

class ArrivedRequest(_message.Message):
    __slots__ = ("key", "capability", "rows")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    rows: _containers.RepeatedCompositeFieldContainer[_cache_pb2.ManifestEntry]
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., rows: _Optional[_Iterable[_Union[_cache_pb2.ManifestEntry, _Mapping]]] = ...) -> None: ...

class ArrivedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("key", "capability", "manifest", "first_token_id", "first_logprob", "proposal", "has_drafter_state", "region_digests")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFTER_STATE_FIELD_NUMBER: _ClassVar[int]
    REGION_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    capability: bytes
    manifest: _containers.RepeatedCompositeFieldContainer[_cache_pb2.ManifestEntry]
    first_token_id: int
    first_logprob: _types_pb2.TokenLogprob
    proposal: Proposal
    has_drafter_state: bool
    region_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ..., manifest: _Optional[_Iterable[_Union[_cache_pb2.ManifestEntry, _Mapping]]] = ..., first_token_id: _Optional[int] = ..., first_logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., has_drafter_state: bool = ..., region_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("accepted", "resend", "digest_s")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_S_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    resend: bool
    digest_s: float
    def __init__(self, accepted: bool = ..., resend: bool = ..., digest_s: _Optional[float] = ...) -> None: ...

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
