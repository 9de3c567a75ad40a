"""Remove user names, passwords, signatures and tokens from URLs before they are recorded.

    https://bob:secret@host/a.jsonl?X-Amz-Signature=…      https://host/a.jsonl
    https://host/a.jsonl?version=3&sig=…                   https://host/a.jsonl?query=5e2f0c1b9a7d
    abfs://container@account.dfs.core.windows.net/a.jsonl  unchanged: the container is not a login

The whole query of a web address is removed, since no list of names covers every secret. The query without signatures
still decides which file is meant, so its digest is kept: two signatures of one file are recorded alike, two versions
of a file are not.
"""

import hashlib
import re
from urllib.parse import parse_qsl, urlencode

SCHEMES_WITHOUT_LOGIN = frozenset(
    {"abfs", "abfss", "adl", "az", "gist", "git", "github", "hf", "oci", "ocilake", "wasb", "wasbs"}
)
"""Schemes in which the part before `@` is not a login but a container, a namespace or a repository."""

_WEB_SCHEMES = ("http://", "https://")
_DIGEST_CHARS = 12
_RECORDED_QUERY = re.compile(rf"query=[0-9a-f]{{{_DIGEST_CHARS}}}")

_SIGNATURE_PARAMETER = re.compile(
    r"x-(amz|goog|oss|cos|ms|tos|obs|bce)-.*|.*(sig|signature|token|password|passwd|pwd|secret|credential|accesskeyid"
    r"|apikey|api[-_]key|auth|authorization|hmac)|googleaccessid|key-pair-id|policy|expires?|exp|verify|q-.*",
    re.IGNORECASE,
)
"""Names of the parameters that sign an address; they change while the file stays the same."""

_AZURE_SIGNATURE_PARAMETERS = frozenset(
    "sv ss srt sp st se spr sip si sr sdd ses sks skv ske skt skoid sktid saoid suoid scid".split()
)
"""Parameters of Azure's shared access signatures, too short to mean the same elsewhere."""

_WEB_ADDRESS = re.compile(r"https?://[^\s'\"<>]+")


def public_url(url: str) -> str:
    """Return a URL without its secrets; a path, and a URL without secrets, are unchanged."""
    if "://" not in url:
        return url
    links = url.split("::")
    # A web address is the last link of a chain, and may hold "::" itself.
    last = next((number for number, one in enumerate(links) if one.lower().startswith(_WEB_SCHEMES)), len(links) - 1)
    return "::".join(_strip_link_secrets(one) for one in [*links[:last], "::".join(links[last:])])


def public_text(text: str) -> str:
    """Return a text, such as another library's message, without the secrets of the web addresses in it."""
    return _WEB_ADDRESS.sub(lambda found: public_url(found[0]), text)


def _strip_link_secrets(url: str) -> str:
    scheme, sign, rest = url.partition("://")
    if not sign:
        return url
    is_web = url.lower().startswith(_WEB_SCHEMES)
    authority = re.split(r"[/?#]" if is_web else "/", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    if scheme.lower() not in SCHEMES_WITHOUT_LOGIN:
        authority = authority.rpartition("@")[2]
    return f"{scheme}://{authority}{_digest_query(after) if is_web else after}"


def _digest_query(after: str) -> str:
    path, _, query = after.partition("#")[0].partition("?")
    if _RECORDED_QUERY.fullmatch(query):
        return f"{path}?{query}"
    given = parse_qsl(query, keep_blank_values=True)
    signing = _AZURE_SIGNATURE_PARAMETERS if any(name == "sig" for name, _ in given) else frozenset[str]()
    kept = [one for one in given if not _SIGNATURE_PARAMETER.fullmatch(one[0]) and one[0] not in signing]
    if not kept:
        return path
    return f"{path}?query={hashlib.sha256(urlencode(kept).encode()).hexdigest()[:_DIGEST_CHARS]}"
