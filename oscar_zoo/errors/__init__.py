"""Every exception that this library raises on purpose.

Six branches decide the exit code of the command line; `cli/main.py` maps them, and a test walks the
tree. Each leaf is named by what happened and carries a stable `code`. The builders here word the
messages: the cause, what was seen, and what to do next. Outcomes of verification are values, not
exceptions (`artifact/outcome.py`).
"""

from oscar_zoo.errors.base import (
    AccessError,
    ConflictError,
    IntegrityError,
    NetworkError,
    NotFoundError,
    OscarZooError,
    UsageError,
)
from oscar_zoo.errors.hubs import (
    Forbidden,
    GatedRepository,
    HubTimeout,
    HubUnreachable,
    LoginRequired,
    RateLimited,
    RepositoryNotFound,
    RevisionNotFound,
    StaleRevision,
)
from oscar_zoo.errors.integrity import (
    DigestMismatchError,
    FrozenIndex,
    MalformedFile,
    RevisionGone,
    RollbackError,
    SignatureError,
    UnsupportedFormat,
    VerificationFailed,
)
from oscar_zoo.errors.machine import (
    MissingDependency,
    OutputExists,
    PathNotFound,
    PortInUse,
    ServerFailed,
    ServerNotFound,
    StorageError,
    UnsupportedMachine,
)
from oscar_zoo.errors.models import (
    ComputeFailed,
    GeometryMismatch,
    InvalidModel,
    NotEnoughMemory,
    UnsupportedModel,
)
from oscar_zoo.errors.names import (
    OFFLINE_OPTION,
    WITHOUT_OPTION,
    AmbiguousName,
    ArtifactNotAsked,
    ArtifactNotFound,
    InvalidName,
    NotLocked,
    OfflineError,
    ScoreNotFound,
    VersionExists,
    go_online,
)

__all__ = [
    "OFFLINE_OPTION",
    "WITHOUT_OPTION",
    "AccessError",
    "AmbiguousName",
    "ArtifactNotAsked",
    "ArtifactNotFound",
    "ComputeFailed",
    "ConflictError",
    "DigestMismatchError",
    "Forbidden",
    "FrozenIndex",
    "GatedRepository",
    "GeometryMismatch",
    "HubTimeout",
    "HubUnreachable",
    "IntegrityError",
    "InvalidModel",
    "InvalidName",
    "LoginRequired",
    "MalformedFile",
    "MissingDependency",
    "NetworkError",
    "NotEnoughMemory",
    "NotFoundError",
    "NotLocked",
    "OfflineError",
    "OscarZooError",
    "OutputExists",
    "PathNotFound",
    "PortInUse",
    "RateLimited",
    "RepositoryNotFound",
    "RevisionGone",
    "RevisionNotFound",
    "RollbackError",
    "ScoreNotFound",
    "ServerFailed",
    "ServerNotFound",
    "SignatureError",
    "StaleRevision",
    "StorageError",
    "UnsupportedFormat",
    "UnsupportedMachine",
    "UnsupportedModel",
    "UsageError",
    "VerificationFailed",
    "VersionExists",
    "go_online",
]
