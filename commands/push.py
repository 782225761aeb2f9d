"""Upload an exported folder to the hub.

Holds: `push`. Leaves out: what is uploaded (commands/export.py, commands/card.py).
Exercise it: `pytest tests/commands/test_card.py`. Read next: commands/card.py.

The token is read from HF_TOKEN, or from where the hub's own login keeps it, and stands in no
message.
"""

from __future__ import annotations

import re
from pathlib import Path

from config.errors import UserError, first_line


def push(folder: Path, name: str, private: bool = True) -> str:
    """Upload a folder as ORG/NAME, made if it is not there; returns its address.

    UserError: no such name, no token, or the hub refuses.
    """
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"--push takes a name of the hub's, ORG/NAME, not {name!r}.")
    token = get_token()
    if not token:
        raise UserError(
            "There is no token for the hub: set HF_TOKEN, or log in by `hf auth login`."
        )
    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export of memagent")
    except HFValidationError as error:
        raise UserError(f"The hub takes no such name: {first_line(error)}.") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        why = first_line(error).replace(token, "***")
        raise UserError(f"{name} cannot be uploaded: {why}.") from None
    return f"{api.endpoint}/{name}"
