"""Ray, Megatron and vLLM behind the protocols of `rlhf.roles`."""

import os
from pathlib import Path

# Every Ray that this user started since the file exists asks for the token in it. Ray itself shows the token only to a
# cluster that it finds (`auto`), not to one given by address, and reads the setting when it is imported: so before.
if (Path.home() / ".ray" / "auth_token").exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")
