"""Everything the engine raises on purpose.

EngineError
├── InvalidRequestError        the caller's request cannot be served as asked (4xx)
│   └── PromptTooLongError
├── AdapterError               something about one adapter
│   ├── InvalidAdapterError    its files are not what they should be
│   ├── UnsupportedAdapterError  well formed, but not honoured exactly, so refused
│   └── AdapterNotLoadedError  asked for by a digest that the engine does not know
├── CapacityError              no room: slots or host cache full of pinned adapters
├── QueueFullError             too many waiting requests
├── DeadlineExceededError      the time that the caller gave the request is over
├── UnsupportedModelError      the base model cannot be served, said at start
└── EngineDeadError            the engine has stopped; nothing more will come
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class InvalidRequestError(EngineError):
    """A request parameter is out of range; ``param`` names it as the user wrote it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own pickling.
        return (_rebuild_invalid_request, (type(self), self.message, self.param))


def _rebuild_invalid_request(
    cls: type[InvalidRequestError], message: str, param: str | None
) -> InvalidRequestError:
    error = cls.__new__(cls)
    InvalidRequestError.__init__(error, message, param=param)
    return error


class PromptTooLongError(InvalidRequestError):
    """The prompt alone fills the model's context."""

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {num_tokens} input tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )


class AdapterError(EngineError):
    """Something is wrong with one adapter."""


class InvalidAdapterError(AdapterError):
    """The adapter's files are damaged, incomplete or do not fit the base model."""


class UnsupportedAdapterError(AdapterError):
    """The adapter uses a feature that would not be served exactly, so it is refused."""


class AdapterNotLoadedError(AdapterError):
    """The engine was asked for an adapter that it was never given, or that was removed."""


class CapacityError(EngineError):
    """Every slot or host-cache place is pinned or in use."""


class QueueFullError(EngineError):
    """The waiting queue is full; try again later."""


class DeadlineExceededError(EngineError):
    """The request was not finished in the time that its caller gave it."""


class UnsupportedModelError(EngineError):
    """The base model's architecture cannot be served."""


class EngineDeadError(EngineError):
    """The engine has stopped, on request or by a failure; a new one is needed."""
