from dspark.v1 import handoff_service_pb2 as _handoff_service_pb2
from dspark.v1 import types_pb2 as _types_pb2
from dspark.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("decode_address", "decode_generation")
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    decode_address: str
    decode_generation: str
    def __init__(self, decode_address: _Optional[str] = ..., decode_generation: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("transfer_engine", "reason")
    TRANSFER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_engine: str
    reason: str
    def __init__(self, transfer_engine: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DecodeTicket(_message.Message):
    __slots__ = ("decode_address", "reservation_id", "capability")
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    decode_address: str
    reservation_id: str
    capability: bytes
    def __init__(self, decode_address: _Optional[str] = ..., reservation_id: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("context", "ticket")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    context: _types_pb2.RequestContext
    ticket: DecodeTicket
    def __init__(self, context: _Optional[_Union[_types_pb2.RequestContext, _Mapping]] = ..., ticket: _Optional[_Union[DecodeTicket, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "queue_s", "compute_s")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: _types_pb2.TokenLogprob
    queue_s: float
    compute_s: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class HandoffDone(_message.Message):
    __slots__ = ("lease_id", "lease_s", "num_bytes", "handoff_s", "transfer_engine", "wire_s", "num_late_bytes", "total_wire_s", "digest_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WIRE_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_s: float
    num_bytes: int
    handoff_s: float
    transfer_engine: str
    wire_s: float
    num_late_bytes: int
    total_wire_s: float
    digest_s: float
    def __init__(self, lease_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., num_bytes: _Optional[int] = ..., handoff_s: _Optional[float] = ..., transfer_engine: _Optional[str] = ..., wire_s: _Optional[float] = ..., num_late_bytes: _Optional[int] = ..., total_wire_s: _Optional[float] = ..., digest_s: _Optional[float] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "handoff_done")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_DONE_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    handoff_done: HandoffDone
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., handoff_done: _Optional[_Union[HandoffDone, _Mapping]] = ...) -> None: ...

class HandOffRequest(_message.Message):
    __slots__ = ("lease_id", "context", "ticket")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    context: _types_pb2.RequestContext
    ticket: DecodeTicket
    def __init__(self, lease_id: _Optional[str] = ..., context: _Optional[_Union[_types_pb2.RequestContext, _Mapping]] = ..., ticket: _Optional[_Union[DecodeTicket, _Mapping]] = ...) -> None: ...

class HandOffResponse(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: HandoffDone
    def __init__(self, done: _Optional[_Union[HandoffDone, _Mapping]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("ended_lease_ids",)
    ENDED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ended_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ended_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class StopHandoffRequest(_message.Message):
    __slots__ = ("key", "capability")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    key: _handoff_service_pb2.HandoffKey
    capability: bytes
    def __init__(self, key: _Optional[_Union[_handoff_service_pb2.HandoffKey, _Mapping]] = ..., capability: _Optional[bytes] = ...) -> None: ...

class StopHandoffResponse(_message.Message):
    __slots__ = ("stopped", "generation")
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    generation: str
    def __init__(self, stopped: bool = ..., generation: _Optional[str] = ...) -> None: ...

class PrefillServiceGetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetWorkerInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...
