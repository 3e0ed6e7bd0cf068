"""A loss of your own: Jeffreys' divergence, KL(T||S) + KL(S||T).

python -m rlhf.launch plugins=[docs/examples/jeffreys.py] distill.loss=jeffreys
"""

from torch import Tensor

from rlhf.plugins import register_loss


@register_loss("jeffreys")
def jeffreys(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    return (teacher_logprobs.exp() - student_logprobs.exp()) * (teacher_logprobs - student_logprobs)
