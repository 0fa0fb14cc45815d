"""From a tokenizer to its vocabulary."""

from genlm.backend._removed import ONE_DECODER, removed_names
from genlm.backend.tokenization.bytes import ByteVocabError as ByteVocabError
from genlm.backend.tokenization.bytes import get_byte_vocab as get_byte_vocab
from genlm.core import Token as Token
from genlm.core import decode_vocab as decode_vocab

__getattr__ = removed_names(
    __name__, {"bytes_to_strs": f"{ONE_DECODER}; the second list has strings"}
)
