"""URLs as they are recorded: without user names, passwords, signatures and tokens.

What belongs here: what of a URL may stand in manifests, statistics, reports, errors and identities. What does not:
reaching what it names (`urls.py`), for which the URL is used as the recipe has it.

    https://bob:secret@host/a.jsonl?X-Amz-Signature=…      https://host/a.jsonl
    https://host/a.jsonl?version=3&sig=…                   https://host/a.jsonl?query=5e2f0c1b9a7d
    abfs://container@account.dfs.core.windows.net/a.jsonl  as it is: the container is not a login

The query of a web address goes whole, since no list of names knows all that is secret. What is left of it without
signatures still decides which file is meant, so a digest stands for it: two signatures of one file are recorded alike,
two versions of a file are not.
"""

import hashlib
import re
from urllib.parse import parse_qsl

SCHEMES_WITHOUT_LOGIN = frozenset(
    {"abfs", "abfss", "adl", "az", "gist", "git", "github", "hf", "oci", "ocilake", "wasb", "wasbs"}
)
"""Schemes in which what stands before `@` names a place: a container, a namespace, a repository."""

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
    """Return a URL without what nobody else may see; a path, and a URL that is public already, as it is."""
    if "://" not in url:
        return url
    links = url.split("::")
    # A web address is the last link of a chain, and may hold "::" itself.
    last = next((number for number, one in enumerate(links) if one.lower().startswith(_WEB_SCHEMES)), len(links) - 1)
    return "::".join(_strip_link_secrets(one) for one in [*links[:last], "::".join(links[last:])])


def public_text(text: str) -> str:
    """Return a text, such as another library's message, with the web addresses in it made public."""
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
    return f"{path}?query={hashlib.sha256(repr(kept).encode()).hexdigest()[:_DIGEST_CHARS]}"
