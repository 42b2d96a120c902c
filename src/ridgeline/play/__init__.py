"""Playing: a trained policy at the controller, many games in parallel, judged with intervals."""

from ridgeline.play.evaluate import Evaluation, evaluate
from ridgeline.play.player import Player, load_player
from ridgeline.play.rollout import GameResult, play_games

__all__ = ["Evaluation", "GameResult", "Player", "evaluate", "load_player", "play_games"]
