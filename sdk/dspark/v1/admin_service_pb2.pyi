from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileRequest(_message.Message):
    __slots__ = ("max_steps", "max_seconds")
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    max_steps: int
    max_seconds: float
    def __init__(self, max_steps: _Optional[int] = ..., max_seconds: _Optional[float] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("num_steps", "seconds", "num_bytes")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    seconds: float
    num_bytes: int
    def __init__(self, num_steps: _Optional[int] = ..., seconds: _Optional[float] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("profile", "trace")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    profile: Profile
    trace: bytes
    def __init__(self, profile: _Optional[_Union[Profile, _Mapping]] = ..., trace: _Optional[bytes] = ...) -> None: ...
