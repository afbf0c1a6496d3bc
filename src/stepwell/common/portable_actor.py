"""Actor classes that processes of any release can use.

Ray stores the class of an actor as a pickle, with references to the functions of its modules. Whoever finds the actor
by name must load it, and so must a node on which Ray restarts the actor. A process of another release, where one of
these functions is in another module or not there, could do neither.
"""

import inspect
from typing import Any


def portable_actor(cls: type) -> type:
    """A class for `ray.remote` that has the calls of `cls`, all of them async, and no reference to a module.

    `cls` itself is imported where the actor runs. It keeps its module and its name: they are in the pickle.
    """
    module, name = cls.__module__, cls.__qualname__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        from importlib import import_module  # these functions are pickled without this module

        self.actor = getattr(import_module(module), name)(*args, **kwargs)

    def forwarding(call: str) -> Any:
        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.actor, call)(*args, **kwargs)

        return forward

    calls = [call for call, _ in inspect.getmembers(cls, inspect.iscoroutinefunction) if not call.startswith("_")]
    return type(name, (), {"__init__": begin, **{call: forwarding(call) for call in calls}})
