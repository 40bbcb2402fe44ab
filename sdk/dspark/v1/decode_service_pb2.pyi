from dspark.v1 import types_pb2 as _types_pb2
from dspark.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeServiceGetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceGetWorkerInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "num_tokens", "max_length", "model_fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    num_tokens: int
    max_length: int
    model_fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., max_length: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "capability", "expires_s", "computes_prompt")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    capability: bytes
    expires_s: float
    computes_prompt: bool
    def __init__(self, reservation_id: _Optional[str] = ..., capability: _Optional[bytes] = ..., expires_s: _Optional[float] = ..., computes_prompt: bool = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("request_id", "epoch", "reservation_id", "capability", "context", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reservation_id: str
    capability: bytes
    context: _types_pb2.RequestContext
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reservation_id: _Optional[str] = ..., capability: _Optional[bytes] = ..., context: _Optional[_Union[_types_pb2.RequestContext, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "epoch", "round", "length", "finish")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    round: int
    length: int
    finish: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., length: _Optional[int] = ..., finish: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "epoch", "reservation_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reservation_id: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reservation_id: _Optional[str] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("admit", "commit", "abort")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    admit: Admit
    commit: Commit
    abort: Abort
    def __init__(self, admit: _Optional[_Union[Admit, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DecodeCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DecodeCommand, _Mapping]]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "epoch", "first_token_id", "drafter_fallback", "first_logprob", "transfer_engine")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    first_token_id: int
    drafter_fallback: str
    first_logprob: _types_pb2.TokenLogprob
    transfer_engine: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_token_id: _Optional[int] = ..., drafter_fallback: _Optional[str] = ..., first_logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., transfer_engine: _Optional[str] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("request_id", "epoch", "round", "base", "token_ids", "num_draft", "num_accepted", "logprobs", "confidences")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    round: int
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft: int
    num_accepted: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft: _Optional[int] = ..., num_accepted: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reason: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("admitted", "verified", "finished", "failed")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    verified: Verified
    finished: Finished
    failed: Failed
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., verified: _Optional[_Union[Verified, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...
