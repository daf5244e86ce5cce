"""Sign a package with a key, and verify the signature: bare elliptic keys, no network.

Make a pair of keys with openssl, which gives the private one to its owner alone:

    openssl ecparam -name prime256v1 -genkey -noout -out key.pem
    openssl ec -in key.pem -pubout -out key.pub.pem
"""

import base64
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kpt_serve.errors import PackageError

from .fields import AGAIN
from .manifest import Manifest, describe_file

if TYPE_CHECKING:
    from model_signing.hashing import Config

NAME = "model.sig"
_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
_PUBLIC = "openssl ec -in key.pem -pubout -out key.pub.pem"
_SIGN = "sign the package again"
#: Bytes of a signature; one of a model of 500 shards has 150 KB.
_LARGEST = 16 << 20


def sign(folder: str | os.PathLike[str], key: str | os.PathLike[str]) -> Path:
    """Sign every file of a package and return the signature's path, `model.sig` in the folder.

    Args:
        folder: The package; whoever changes a file afterwards, the card too, has to sign it again.
        key: A private key (PEM) for the curve prime256v1, secp384r1 or secp521r1, without a password.

    Raises:
        PackageError: The folder is no package, the key is none or lies in the package, or model-signing is missing.
    """
    place, path = Path(folder), Path(key)
    Manifest.read(place)
    if path.resolve().is_relative_to(place.resolve()):
        raise PackageError(f"{key} lies in the package, which is handed out with it: keep the private key elsewhere")
    _files(place)
    hashing = _hashing()
    from cryptography.exceptions import UnsupportedAlgorithm
    from model_signing import signing

    try:
        config = signing.Config().use_elliptic_key_signer(private_key=path)  # type: ignore[no-untyped-call]
    except TypeError as error:
        hint = "openssl ec -in KEY -out NEW writes it without one"
        raise PackageError(f"{key} has a password; expected a private key without one: {hint}") from error
    except OSError as error:
        raise PackageError(f"{key} can't be read: {error.strerror}; make a private key: {_MAKE}") from error
    # AttributeError: the library asks a key that is not an elliptic one for its curve.
    except (ValueError, AttributeError, UnsupportedAlgorithm) as error:
        raise PackageError(f"{key} is no private elliptic key (PEM) that can sign: make one: {_MAKE}") from error
    try:
        config.set_hashing_config(hashing).sign(place, place / NAME)
    except OSError as error:
        raise PackageError(f"{folder} can't be signed: {error.strerror or error}: {error.filename}") from error
    return place / NAME


def verify_signature(folder: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> None:
    """Raise unless the owner of a key signed exactly the files that a package has.

    Args:
        folder: The package.
        public_key: The public key (PEM), which must come from elsewhere than the package.

    Raises:
        PackageError: It names the first file that is missing, added or changed since; or the signature is missing,
            garbage or another key's, the key is none, or model-signing is missing.
    """
    # A link to a package, as a mounted volume is, has the files of what it leads to.
    place, path = Path(folder).resolve(), Path(public_key)
    signed, left_out = _read(place / NAME)
    found = _files(place)
    hashing = _hashing()
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from model_signing import verifying

    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PackageError(f"{public_key} can't be read: {error.strerror}; expected a public key: {_PUBLIC}") from error
    except (ValueError, AttributeError, UnsupportedAlgorithm) as error:
        raise PackageError(f"{public_key} is no public elliptic key (PEM): write it with {_PUBLIC}") from error
    try:
        config.set_hashing_config(hashing).verify(place, place / NAME)
    except InvalidSignature as error:
        raise PackageError(f"{place / NAME} was changed, or forged: the key did not sign it; {AGAIN}") from error
    except OSError as error:
        raise PackageError(f"{folder} can't be read: {error.strerror or error}; {AGAIN}") from error
    except (ValueError, LookupError, TypeError) as error:
        if str(error).startswith("Key mismatch"):
            raise PackageError(
                f"{place / NAME} was made with another key than {public_key}: take the public key of whoever signed it"
            ) from error
        # The library has found the signature valid before it compares files.
        if str(error).startswith("Signature mismatch"):
            raise PackageError(f"{folder}: {_difference(place, found, signed) or error}; {AGAIN}") from error
        raise PackageError(f"{place / NAME} is no signature of a key: {_describe(error)}; {_SIGN}") from error
    for name in left_out:
        if name != NAME and os.path.lexists(place / name):
            raise PackageError(f"{place / NAME} leaves out {name!r}: remove it, or {_SIGN}")


def _hashing() -> "Config":
    try:
        import OpenSSL  # noqa: F401 - model-signing imports it and doesn't ask for it
        from model_signing.hashing import Config
    except ImportError as error:
        raise PackageError(f"a signature needs {error.name}: pip install 'kpt-serve[sign]'") from error
    # Relative to the folder, or the signature itself is one file too many; and Git's files are files too.
    config = Config()  # type: ignore[no-untyped-call]
    return config.set_ignored_paths(paths=[NAME], ignore_git_paths=False)


def _read(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return what a signature says, which is not verified yet: SHA-256 by file, and paths that it leaves out."""
    try:
        if path.stat().st_size > _LARGEST:
            raise PackageError(f"{path} has {path.stat().st_size} bytes; a signature has at most {_LARGEST}: {_SIGN}")
        bundle = json.loads(path.read_text(encoding="utf-8"))
        # Without it the library prints a warning, and tells a wrong key by an error that says nothing.
        if not bundle["verificationMaterial"]["publicKey"]["hint"]:
            raise ValueError("it does not say which key it was made with")
        predicate = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))["predicate"]
        signed = {str(each["name"]): str(each["digest"]) for each in predicate["resources"]}
        return signed, [str(each) for each in predicate["serialization"].get("ignore_paths", ())]
    except FileNotFoundError as error:
        raise PackageError(f"{path} is missing: the package is not signed; take it from whoever signs it") from error
    except OSError as error:
        raise PackageError(f"{path} can't be read: {error.strerror}; {AGAIN}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"{path} is no signature of a key: {_describe(error)}; {_SIGN}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('. ')}"


def _files(folder: Path) -> set[str]:
    """Return the paths of the files that a signature covers; links, which may lead out of the folder, are refused."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise PackageError(f"{folder}: {name!r} is a link or no plain file: put the file itself there")
        if path.is_file() and name != NAME:
            found.add(name)
    return found


def _difference(folder: Path, found: set[str], signed: dict[str, str]) -> str:
    """Return which file was added, is missing or was changed since the signature."""
    for path in sorted(signed.keys() - found):
        return f"file {path!r} is missing; it was signed"
    for path in sorted(found - signed.keys()):
        return f"file {path!r} was added after the package was signed"
    for path in sorted(found):
        if describe_file(folder, path).sha256 != signed[path]:
            return f"file {path!r} was changed after the package was signed"
    return ""
