"""The bridge into transformers: a paged KV cache, and an attention function that writes and reads it."""

from cbresearch.attention.function import ATTENTION_NAME as ATTENTION_NAME
from cbresearch.attention.function import attention_function as attention_function
from cbresearch.attention.function import choose_backend as choose_backend
from cbresearch.attention.function import paged_copy as paged_copy
from cbresearch.attention.function import paged_logits as paged_logits
from cbresearch.attention.function import shared_copy as shared_copy
from cbresearch.attention.pool import PagedCache as PagedCache
from cbresearch.attention.static import StaticStep as StaticStep
from cbresearch.attention.step import PagedStep as PagedStep
from cbresearch.attention.step import batch_order as batch_order
from cbresearch.attention.torch_backend import LatentCache as LatentCache
