from dataclasses import dataclass

from memagent import Agent, ReadConfig


@dataclass(frozen=True)
class Config(ReadConfig):
    topic: str = "people"
    """what the notes are about"""


class MyAgent(Agent):  # of a user's own: a setting, a prompt, a turn reward and a count
    Config = Config
    prompts = {"note": "{section}\n{topic}? {memory}\n", "final": "{problem}\n{memory}\n{answer}\n"}
    rates = {"notes_long": ("long", "notes")}

    def run(self, task):
        memory, c = "nothing", self.config
        for section in self.sections(task):
            slots = {"section": section, "topic": c.topic, "memory": memory}
            turn = yield self.prompt("note", c.memory_tokens, **slots)
            memory = turn.response
        yield self.prompt("final", c.final_tokens, final=True, problem=task.question, memory=memory)

    def turn_rewards(self, trajectory):
        return [{"short": float(len(turn.response_ids) < 9)} for turn in trajectory.turns]

    def count(self, task, turn):
        return {} if turn.prompt.final else {"notes": 1, "long": len(turn.response_ids) > 9}
