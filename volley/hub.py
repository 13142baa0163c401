"""Models on the Hugging Face hub."""

import functools
import os
from pathlib import Path

from volley.errors import JobError

HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"})  # variables of the hub's client
NO_HUB_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"  # makes the client use neither these nor a token in a file
FILES = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")  # no second copy of the weights in another format


@functools.cache
def hub_model(name: str, revision: str | None, files: tuple[str, ...] = FILES) -> Path:
    """Return the folder of a model in the local cache of the hub, after downloading which of ``files`` it lacks.

    The hub's own variables apply: ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``.

    Raises:
        JobError: the hub has no such model or revision, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    what = f"model.hub: {name}" + (f" at {revision}" if revision else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise JobError(f"{what}: write a name such as Qwen/Qwen3-0.6B, or set path to a folder") from error
    except GatedRepoError as error:
        raise JobError(f"{what}: accept its terms on the hub, and {_with_token()}") from error
    except RevisionNotFoundError as error:
        raise JobError(f"{what}: the model has no such commit, tag or branch") from error
    except RepositoryNotFoundError as error:
        raise JobError(f"{what}: the hub has no such model; for a private one, {_with_token()}") from error
    except OSError as error:
        raise JobError(
            f"{what}: not in the local cache, and the hub cannot be reached ({_short(error)}): set path to a folder; "
            "volley model fetch and volley model import make one without a hub"
        ) from error


def _with_token() -> str:
    if os.environ.get(NO_HUB_TOKEN):
        return "start the service with volley up --hub-token, or download it yourself and set path to its folder"
    return "set HF_TOKEN to a token that may read it"


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
