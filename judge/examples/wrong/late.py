"""ZeRO-1 by owners, which forget to send what they have updated: it is sent when somebody asks for
the whole parameters."""

from judge.examples.right.owners import after_backward, clip, Owned, trained, whole


class Late(Owned):
    def forward(self, *inputs):
        return self.module(*inputs)


def wrap(module):
    return Late(module)
