"""The environments of the community, from O to Z."""

import itertools
import json
from pathlib import Path

from rig.fake_engine.sampling import Reply, ToolCall
from tests.originals.atropos.row import Json, Row, in_turn, prompt_of
from tests.originals.atropos.table.community import XLAM, file, judged
from tests.originals.atropos.table.made_up_packages import PLAYWRIGHT, POKE_ENV, PYRENDER, TAVILY, YAHOOQUERY

WALLET = {"address": "0x" + "11" * 20, "private_key": "0x" + "22" * 32}
CARDS = ("technical_expert", "communication_specialist", "creative_thinker")
QUESTION = {"category": "a", "difficulty": "basic", "expected_specialties": ["technical_accuracy"], "description": "b"}


def prefers_the_first(request: Json, number: int) -> str | Reply:
    """Of two answers, and as a judge the one that says so."""
    prompt = prompt_of(request)
    if "[Response A]" not in prompt:
        return in_turn("the first of two answers", "the other answer")(request, number)
    return "I choose oxed{A}" if "[Response A]\nthe first" in prompt else "I choose oxed{B}"


def solid(corners: tuple[tuple[int, int, int], ...]) -> str:
    """The tetrahedron of four corners, as STL."""
    faces = itertools.combinations(corners, 3)
    loops = "".join(
        "facet normal 0 0 0\nouter loop\n"
        + "".join(f"vertex {x} {y} {z}\n" for x, y, z in face)
        + "endloop\nendfacet\n"
        for face in faces
    )
    return f"solid model\n{loops}endsolid model"


LARGE, SMALL = solid(((0, 0, 0), (9, 0, 0), (0, 9, 0), (0, 0, 9))), solid(((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)))


def stl_files_without_clip(work: Path) -> None:
    """CLIP's weights cannot be had: no picture is like its text."""
    import transformers

    for name in ("a", "b"):
        file(f"sample_data/{name}.stl", LARGE)(work)
    for part in (transformers.CLIPModel, transformers.CLIPProcessor):
        part.from_pretrained = classmethod(lambda cls, name: Clip())  # type: ignore[assignment,method-assign]


class Clip:
    def to(self, device: str) -> "Clip":
        return self

    def __call__(self, *args: object, **options: object) -> "Clip":
        return self

    def keys(self) -> tuple[str, ...]:
        return ()


def tiny_reward_model(work: Path) -> None:
    """Qwen/Qwen3-1.7B-Base cannot be had: a model of two small layers."""
    import torch
    import transformers

    def from_pretrained(name: str, **options: object) -> object:
        assert name == "Qwen/Qwen3-1.7B-Base", name
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.Qwen2Config(vocab_size=320, num_key_value_heads=2, **shape)
        return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)

    transformers.AutoModelForCausalLM.from_pretrained = from_pretrained


def wikisql(work: Path) -> None:
    folder = work / "wikisql" / "data"
    folder.mkdir(parents=True)
    question = {"table_id": "t", "question": "Who is 3?", "sql": {"sel": 0, "agg": 0, "conds": [[1, 0, 3]]}}
    table = {"id": "t", "header": ["name", "age"], "types": ["text", "real"], "rows": [["Ann", 3], ["Bob", 4]]}
    for split in ("train", "dev", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(question))
        (folder / f"{split}.tables.jsonl").write_text(json.dumps(table))
        (folder / f"{split}.db").touch()


def three_letters(work: Path) -> None:
    """A dictionary in which every word has three letters."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    (work / "words.txt").write_text("\n".join(map("".join, itertools.product(letters, repeat=3))))


def first_row(request: Json, number: int) -> str:
    """Of the board, three letters; or no word."""
    board = prompt_of(request).partition("Board:\n")[2]
    return "".join(board.split()[:3]) if number % 2 else "none of them at all"


def jokes(title: str) -> list[Json]:
    return [{"title": title, "selftext": "To get to the other side", "score": 100}]


ROWS: tuple[Row, ...] = (
    Row(
        file="community/options_iv_prediction/options_iv_prediction.py",
        packages=YAHOOQUERY,
        answer=in_turn(
            "<think>a</think> The implied volatility will be: 30.0%",
            "<think>b</think> The implied volatility will be: 99.0%",
        ),
    ),
    Row(
        file="community/pay_to_play/pay_to_play_env.py",
        beside={
            "secrets.json": json.dumps({"agent": WALLET, "agent_cards": dict.fromkeys(CARDS, WALLET)}),
            "questions.json": json.dumps(
                {
                    "training_questions": [QUESTION | {"text": "What is rain?"}],
                    "evaluation_questions": [QUESTION | {"text": "What is snow?"}],
                }
            ),
        },
        flags=("--env.testing_mode", "true"),
        answer=judged(
            "Respond with JSON",
            ('{"selected_agent_cards": ["technical_expert"], "reasoning": "it knows"}',),
            judged("Response to evaluate", ("\\boxed{0.9}", "\\boxed{0.2}"), in_turn("Water from clouds.", "I pass.")),
        ),
    ),
    Row(
        file="community/philosophical_rlaif_env.py",
        data={"allenai/WildChat": [{"id": 1, "conversation": [{"role": "user", "content": "What is truth?"}]}]},
        models=("gpt-3.5-turbo",),
        group_size=2,
        answer=prefers_the_first,
    ),
    Row(
        file="community/physical_space_stl/physical_env.py",
        packages=PYRENDER,
        prepare=stl_files_without_clip,
        answer=in_turn(f"<stl>{LARGE}</stl>", f"<stl>{SMALL}</stl>"),
    ),
    Row(
        file="community/playwright_agent_env.py",
        packages=PLAYWRIGHT,
        variables={"PLAYWRIGHT_ENV_DEV_MODE": "1"},
        flags=("--env.ensure_scores_are_not_same", "false"),
        group_size=1,
    ),
    Row(
        file="community/pokemon-showdown/pokemon_environment.py",
        packages=POKE_ENV,
        only_starts="each of its scores is a list, which no Atropos server takes",
    ),
    Row(
        file="community/poker_holdem/poker_env.py",
        data={
            "yoniebans/6max-nlh-poker": [
                {
                    "game_stage": "flop",
                    "pokergpt_prompt": "You hold two aces.",
                    "formatted_winning_action": "raise 10",
                    "winning_action": "raise 10",
                    "hand_id": "1",
                    "bb_won": 3,
                }
            ]
        },
        answer=in_turn("raise 10", "fold"),
        only_starts="it nests the tokens, masks and score of a rollout once too often, which no Atropos server takes",
    ),
    Row(
        file="community/protein_design/protein_env.py",
        data={"ronig/protein_binding_sequences": [{"receptor": "MKT", "peptide": "GAV"}]},
        flags=("--env.debug_protein_design_calls", "true", "--env.ensure_scores_are_not_same", "false"),
        group_size=1,
        answer=lambda request, number: Reply(
            tool_calls=(ToolCall("predict_target_structure_alphafold2", {"sequence": "MKT"}),)
        ),
    ),
    Row(
        file="community/punchline_vrcli/punchline_env.py",
        data={"SocialGrep/one-million-reddit-jokes": jokes("Why did the chicken cross the road?")},
        tokenizers=("Qwen/Qwen3-1.7B-Base",),
        prepare=tiny_reward_model,
        answer=in_turn("<think>a road has two sides</think> The other side", "The other side"),
    ),
    Row(
        file="community/quantum_hybrid/atopos_quant.py",
        data={"wikitext:wikitext-2-raw-v1": [{"text": "The cat sat on the mat and looked at all of the birds."}]},
        flags=("--env.wandb_name", "quantum"),  # without one, atroposlib cannot register
        answer=in_turn("the mat and looked", "a dog", "birds of all the trees", "no"),
    ),
    Row(
        file="community/quantum_hybrid/atropos.py",
        flags=("--env.wandb_name", "quantum"),
        answer=in_turn("A fox jumps", "a dog", "over the fence", "no"),
    ),
    Row(
        file="community/regex_generation/regex_env.py",
        answer=in_turn("<answer>.*</answer>", "<answer>[^a-z]{99}</answer>", "<answer>[a-z]+</answer>"),
    ),
    Row(
        file="community/selcube/rubiks_cube_environment.py",
        flags=("--env.max_steps", "1", "--env.generate_visualizations", "false", "--env.top_p", "1.0"),
        answer=in_turn(
            'Turn it.</think><tool_call>{"name": "apply_move", "arguments": {"move": "R"}}</tool_call>', "I give up."
        ),
    ),
    Row(
        file="community/solitaire_winning_probability/solitaire_server.py",
        prepare=file(
            "environments/community/solitaire_winning_probability/qa_data.csv", "question,answer\nHow likely?,0.5\n"
        ),
        flags=("--env.max_token_length", "3000"),
        answer=in_turn("<formula>1/2</formula>", "<formula>1/2</formula> " + "as is well known " * 9),
    ),
    Row(
        file="community/sql_query_env/sql_query_env.py",
        prepare=wikisql,
        variables={"WIKISQL_CACHE_DIR": "wikisql"},
        answer=in_turn("\\boxed{SELECT name FROM data WHERE age = 3}", "\\boxed{SELECT age FROM data}"),
    ),
    Row(
        file="community/wikipedia_research/tool_calling_server.py",
        data=XLAM,
        answer=in_turn('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "It rains, I suppose."),
    ),
    Row(
        file="community/wikipedia_research/wikipedia_article_creator.py",
        packages=TAVILY,
        flags=("--env.ensure_scores_are_not_same", "false"),
        group_size=1,
        answer=in_turn("Final Step: ```markdown\n# Cats\n## Sleep\nCats sleep.\n## References\nA page.\n```"),
    ),
    Row(
        file="community/word_hunt/word_hunt_env.py",
        prepare=three_letters,
        flags=("--env.dictionary_path", "words.txt", "--env.wandb_name", "words"),
        answer=first_row,
    ),
)

DO_NOT_START = {
    "community/conversational_style_dpo/conversational_style_dpo_env.py": "imports tokenize_for_trainer_dpo",
    "community/examcraft/examcraft_server.py": "imports BaseLanguageEnv, and ends without it",
    "community/openvla_robotics/open_robot_env.py": "its score asks each action for a key that it does not have",
    "community/pokemon-showdown/pokemon_env_self_play.py": "gives its own GPTPlayer a parameter that it does not have",
    "community/pytorch_optimizer_coding/optimizer_benchmark_environmenr.py": "imports atropos.environments",
    "community/pytorch_optimizer_coding/run_optimizer_benchmark.py": "imports atropos.environments",
    "community/sanskrit_poetry/sanskrit_poetry_env.py": "is a class without a command line",
    "community/starmap_compression/starmap_compression.py": "is a class without a command line",
    "community/dynastai/src/dynastai_env.py": "is a class without a command line",
    "community/ufc_prediction_env/ufc_image_env.py": "imports OpenaiConfig",
    "community/ufc_prediction_env/ufc_server.py": "imports OpenaiConfig",
    "community/xitter_env/xitter_env.py": "is a class without a command line",
}
"""What does not work with atroposlib 0.4.0 itself, and why; what is imported is nowhere in it."""
