"""The process that plays one game of ALFWorld: a script that needs its packages, nothing of ours.

TextWorld's planner keeps a game in global variables of its library, and a process can be ended. The
argument is the file of a game; commands come in and {text, commands, won} goes out, a line of JSON
each; {error} ends it. Without an argument it says whether the packages can be used.
"""

import json
import os
import sys


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print

    def reply(**fields: object) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    try:
        import fast_downward  # noqa: F401  # is it there?
        import textworld
        from alfworld.agents.utils.misc import Demangler
        from textworld.envs.pddl import PddlEnv

        env = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        if not sys.argv[1:]:
            return reply(ready=True)
        env.load(sys.argv[1])
        names = Demangler(game_infos=env._entity_infos, shuffle=False)
        for info in env._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id)
        state, won = env.reset(), False
        reply(text=state.feedback, commands=state["admissible_commands"], won=won)
        for line in sys.stdin:
            state, _, _ = env.step(json.loads(line))
            won = bool(state["won"])
            reply(text=state.feedback, commands=state["admissible_commands"], won=won)
    except Exception as error:  # of a damaged game, or whatever an import raises
        reply(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])


if __name__ == "__main__":
    main()
