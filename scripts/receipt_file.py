"""Reading receipts exactly: numbers keep their spelling, so that canonical bytes can be made again."""
import ctypes
import ctypes.util
import json

BLOCKS = ["schema", "tool", "invocation", "subjects", "platform", "requested", "effective", "evidence", "result",
          "result_digest", "measurements", "gates", "not_run", "run"]
MAJOR = 1


class ReceiptError(Exception):
    """A file that is no receipt this reader can read."""


class Float(float):
    """A float that remembers how it was written."""

    def __new__(cls, text):
        self = super().__new__(cls, text)
        self.text = text
        return self


def _unique(pairs):
    out = {}
    for key, value in pairs:
        if key in out:
            raise ReceiptError(f"duplicate key {key!r}")
        out[key] = value
    return out


def _refuse_constant(text):
    raise ReceiptError(f"{text} is no JSON number")


def load(path):
    """The receipt in `path`; raises ReceiptError naming what is wrong."""
    try:
        with open(path, encoding="utf-8") as file:
            receipt = json.load(file, object_pairs_hook=_unique, parse_float=Float, parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise ReceiptError(str(error)) from error
    schema = receipt.get("schema") if isinstance(receipt, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != "fnx.receipt":
        raise ReceiptError("no fnx receipt: schema.name is not fnx.receipt")
    major = str(schema.get("version", "")).split(".")[0]
    if not major.isdigit() or int(major) > MAJOR:
        raise ReceiptError(f"schema version {schema.get('version')!r} is newer than {MAJOR}.x, which this reader knows")
    return receipt


def canonical(value):
    """Canonical text: no spaces, keys in file order, numbers as written."""
    if isinstance(value, dict):
        return "{" + ",".join(canonical(k) + ":" + canonical(v) for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, Float):
        return value.text
    return json.dumps(value, ensure_ascii=False)


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3(data):
    """XXH3-128 of bytes as 32 hex digits, or None when libxxhash, which the tools themselves need, is not here."""
    try:
        function = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0").XXH3_128bits
    except (OSError, AttributeError):
        return None
    function.restype = _Hash128
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    hashed = function(data, len(data))
    return f"{hashed.high:016x}{hashed.low:016x}"
