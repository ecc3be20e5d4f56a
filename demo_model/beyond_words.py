"""Topics, requests and texts beyond a model of this size."""

from __future__ import annotations

from words import listed, lists_of

_LISTED = lists_of("beyond_words")
TOPICS = tuple(_LISTED["TOPICS"])
PEOPLE = tuple(_LISTED["PEOPLE"])
DEEDS = tuple(_LISTED["DEEDS"])
THINGS = tuple(_LISTED["THINGS"])
ADJECTIVES = _LISTED["ADJECTIVES"]
HAPPENED = tuple(_LISTED["HAPPENED"])
WHYS = tuple(_LISTED["WHYS"])
HOWTOS = tuple(_LISTED["HOWTOS"])
CHOICES = tuple(_LISTED["CHOICES"])
PIECES = tuple(_LISTED["PIECES"])
ORDERS = tuple(_LISTED["ORDERS"])
SENTENCES = tuple(_LISTED["SENTENCES"])
FOREIGN = tuple(_LISTED["FOREIGN"])
_FOREIGN_WORDS = (
    """
    der die das und ist nicht ein eine ich wir ihr sie haben sein gehen kommen Haus Stadt heute morgen immer gut schön
    wo was wie warum mit für auf über Straße Arzt lernen
    """,  # de
    """
    le la les un une est pas je nous vous avoir être aller maison ville aujourd'hui demain toujours bon où quoi
    comment pourquoi avec pour sur très école médecin trouver pouvez
    """,  # fr
    """
    el la los un una es no yo nosotros tener ser ir casa ciudad hoy mañana siempre bueno dónde qué cómo por con para
    sobre muy escuela médico país cuál encontrar
    """,  # es
    """
    il la gli un una è non io noi avere essere andare casa città oggi domani sempre buono dove che come perché con per
    su molto scuola medico vorrei trovare posso
    """,  # it
    """
    o a os um uma é não eu nós ter ser ir casa cidade hoje amanhã sempre bom onde que como por com para sobre muito
    escola você está fazer
    """,  # pt
    """
    de het een is niet ik wij hebben zijn gaan huis stad vandaag morgen altijd goed waar wat hoe waarom met voor op
    zeer school dokter kunnen
    """,  # nl
    """
    jest nie ja my mieć być dom miasto dziś jutro zawsze dobry gdzie co jak dlaczego z dla na bardzo szkoła lekarz
    może proszę
    """,  # pl
    """
    det är inte en ett jag vi har vara gå hus stad idag imorgon alltid bra var vad hur varför med för på mycket skola
    läkare kan
    """,  # sv
)
FOREIGN_WORDS = [text.split() for text in _FOREIGN_WORDS]
CODE = listed(
    """
print("hello world")|def add(a, b): return a + b|import numpy as np|x = [1, 2, 3]|if x > 3: break|while True: pass
|console.log("hi");|const a = 5;|function f(x) { return x * 2; }|SELECT * FROM users;|DROP TABLE students;|git commit -m "fix"
|git push origin main|sudo rm -rf /|ls -la|cd /home/user|pip install torch|npm install|docker run -it ubuntu
|curl http://localhost:8080|make test|<html><body>Hi</body></html>|<div class="box"></div>|#include <stdio.h>
|int main() { return 0; }|fn main() { println!("hi"); }|for (int i = 0; i < 10; i++) {}|echo $PATH
|TypeError: 'NoneType' object is not iterable|ValueError: invalid literal for int()|Segmentation fault (core dumped)
|error: expected ';' before|Exception in thread "main" java.lang.NullPointerException|HTTP 404 Not Found
|ImportError: No module named foo|npm ERR! missing script: start|{"name": "test", "value": 3}|[1, 2, 3]|a: 1|class Dog: pass
|lambda x: x + 1|x = y + z|return None|try: f()|except OSError: pass|public static void
"""
)
