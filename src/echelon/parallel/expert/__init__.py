"""Expert parallelism: ranks hold different experts, and tokens go to them and come back by all-to-all.

split     which modules hold experts, and what a rank keeps of them
modules   what such a module does instead of its forward
dispatch  who sends how many rows to whom
slots     the slots of tokens, sorted by expert
journey   rows on their way between ranks, and their gradients back
"""

from echelon.parallel.expert.modules import SpreadExperts, experts_of, talks_in_forward
from echelon.parallel.expert.split import Spread, spread_experts

__all__ = ["Spread", "SpreadExperts", "experts_of", "spread_experts", "talks_in_forward"]
