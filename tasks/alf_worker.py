"""The process in which ALFWorld's games run: a script that needs the packages and nothing of ours.

Holds: `main` (imports the packages once, forks a process for every game), `serve` (one game).
Leaves out: who starts it and asks (tasks/alf.py).
Exercise it: `pytest tests/tasks/test_alf.py`. Read next: tasks/alf.py.

Every game has a process of its own: TextWorld's planner keeps a game in global variables of its
library, and a process can be ended. It lives as long as the other end of its socket.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Wait at the socket whose number is the first argument, and fork for each game asked for."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    try:
        import textworld
        from alfworld.agents.utils.misc import Demangler
        from textworld.envs.pddl import PddlEnv

        def environment():
            return PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))

        environment()  # the planner's library is there
    except Exception as error:  # whatever a package of the user's raises when it is imported
        parent.sendall(f"{type(error).__name__}: {error}".encode())
        return
    parent.sendall(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for games that have ended
    while True:
        message, sockets, _, _ = socket.recv_fds(parent, 1, 1)
        if not message:
            return
        game = socket.socket(fileno=sockets[0])
        if os.fork():
            game.close()
            continue
        parent.close()
        with game, game.makefile("r", encoding="utf-8") as lines:
            serve(environment(), Demangler, game, lines)
        os._exit(0)


def serve(env, demangler, game: socket.socket, lines) -> None:
    """Play one game: first the path of its file, then commands, a line of JSON each.

    Replies are {pid} first, then {text, commands, won}; {error} ends it.
    """

    def reply(**fields) -> None:
        game.sendall(json.dumps(fields).encode() + b"\n")

    reply(pid=os.getpid())
    try:
        env.load(json.loads(next(lines)))
        names = demangler(game_infos=env._entity_infos, shuffle=False)
        for info in env._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id)
        state, won = env.reset(), False
        while True:
            reply(text=state.feedback, commands=state["admissible_commands"], won=won)
            state, _, _ = env.step(json.loads(next(lines)))
            won = bool(state["won"])
    except StopIteration:  # nobody asks any more
        pass
    except Exception as error:  # a damaged game: TatSu's, the translator's, ...
        reply(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])


if __name__ == "__main__":
    main()
