"""A seeded mutator of files, and the limits under which a reader meets what it makes."""

import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS, GROWTH = 30, 1 << 30
"""What one input may take: seconds, and bytes of memory beyond what the process has."""
TOKENS = (
    *(b"\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\xff" * 8, b"\n", b"\xed\xa0\x80"),
    *(b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"null", b"true", b'""', b"[]", b"{}", b"'", b'"', b": "),
    *(b"[" * 3000, b'{"a":' * 3000, b"- " * 3000, b"&a [*a]", b"!!python/name:os.system ", b"%s", b"~", b"../" * 9),
)
"""What damage by chance hardly ever writes: extreme numbers, other types, deep nesting."""


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """``data`` with one to three changes; ``others`` are spliced in. Most fall near an end, where headers are."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.6:
            at = min(at, rng.randrange(400)) if rng.random() < 0.7 else max(at, len(data) - rng.randrange(400))
        before, after, length = data[:at], data[at:], min(len(data), 1 << rng.randrange(9))
        match rng.randrange(8):
            case 0 if after:
                data = before + bytes([after[0] ^ 1 << rng.randrange(8)]) + after[1:]
            case 1:
                data = before
            case 2:
                data = before + rng.randbytes(length) + after
            case 3:
                data = before + after[:length] * rng.choice((2, 2, 50)) + after[length:]
            case 4:
                data = before + bytes(min(length, len(after))) + after[length:]
            case 5:
                other = rng.choice(others)
                data = before + other[rng.randrange(len(other) + 1) :]
            case 6:
                data = before + after[length:]
            case _:
                token = rng.choice(TOKENS)
                data = before + token + after[rng.choice((0, len(token))) :]
    return data


class TooLongError(BaseException):
    """An input took more than SECONDS; no reader's ``except Exception`` stops it."""


@contextmanager
def limits() -> Iterator[None]:
    """Within GROWTH more memory. A MemoryError that a reader turns into its own error is still in its chain."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GROWTH, hard))
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_long(*_: object) -> None:
    raise TooLongError


def complaint(read: Callable[[], object], own: type[Exception]) -> str:
    """What is wrong with how ``read`` meets its input, within :func:`limits`; empty where it reads or refuses it."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read()
    except own as error:
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, MemoryError):
                return f"over {GROWTH >> 20} MiB: {error}"
            link = link.__cause__ or link.__context__
        if len(str(error).splitlines()) != 1:
            return f"not one line: {error}"
    except TooLongError:
        return f"over {SECONDS} s"
    except MemoryError:
        return f"MemoryError: over {GROWTH >> 20} MiB"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""
