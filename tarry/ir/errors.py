"""The one error of the IR: an illegal graph, or a raw graph or text that cannot become one."""


class IRError(Exception):
    """A graph breaks a rule of the IR.

    Users should never see it: it means that the recorder or a pass made a graph that is not legal, so the message
    carries what the author of that code needs (the rule, the node, its neighbours).
    """
