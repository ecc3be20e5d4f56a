"""Small talk assembled from parts, by answer. `[a/b/]` stands for one of the parts, which may be
empty.
"""

from __future__ import annotations

import re
from random import Random

from talks import CAN_DO, HELP, JOKE, MAKER, NAME, PRODUCT, WHAT, WHO
from words import listed

_PARTS = re.compile(r"\[([^\[\]]*)\]")
_GOOD = (
    "good/great/nice/smart/clever/kind/sweet/funny/cute/wonderful/amazing/brilliant/excellent/lovely/fantastic/helpful/useful/cool/"
    "fine/super/perfect/friendly/impressive/fast/beautiful"
)
_BAD = (
    "bad/stupid/dumb/useless/terrible/awful/wrong/boring/silly/slow/horrible/poor/ugly/weak/annoying/broken/rubbish/mean/lazy/"
    "crazy/worthless/pathetic/lame/ridiculous/hopeless"
)
_OF_US = "work/bot/model/answer/machine/job/thing/program/assistant/AI/tool/reply/response/robot/idea/one"
_ART = "a /some /one /a really /a very /"

FORMS: dict[str, tuple[str, ...]] = {
    "You are welcome.": listed(
        """
[ok /ok, /great, /cool, /oh /wow /well, /perfect, /]thank[s/ you][/ a lot/ so much/ very much/ again/ a bunch/ a ton
/ indeed/ for now]
|[many/big/lots of/a thousand/warm/so many/my] thanks[/ to you/ again/ for everything/ for your time/, friend]
|[thanks/thank you/thx/ty/cheers/tnx/thanx/thank u/tks][/ for that/ for this/ for your help/ for helping/ for the help
/ for the answer/ for all/ for trying/, you are great]
|[thx/ty/cheers/tnx/thanks/thank you/thanx/thank u][/ friend/ buddy/ pal/ mate/ dear/ man/ bro/ model/ bot/ Holdfast/ all
/ much/ a lot/ so much]
|[I/we] [really /do /very much /] [appreciate/value] [it/that/this/your help/your time/the help]
|[this/that/it/your help] is [much /very much /greatly /really /so /]appreciated|[much/greatly/so] [obliged/grateful/thankful]
|[I am/I'm/we are] [so /very /really /][grateful/thankful][/ for that/ for your help/ to you]|[that/this/it/you] [really /
][helped/helps][/ a lot/ me/ me a lot][, thanks/. Thank you/]
"""
    ),
    "Good bye!": listed(
        """
[ok/okay/well/alright/right/so/oh/now/] [bye/bye bye/goodbye/good bye/cya/see ya/ciao/farewell/later/see you/bye now/byebye]
|[bye/goodbye/good bye/cya/see ya/ciao/farewell/adieu/so long][/ now/ for today/ friend/ buddy/ Holdfast/ bot/ little one
/ all/ everybody/, take care/, and thanks/, it was nice]
|[see/catch/meet/talk to/speak to] [you/ya/u] [later/soon/next week/again/around/on Monday/another day/next time/some day
/in the morning/tonight/on Friday/in an hour/after lunch/at noon/this evening/next month/in a bit/then/there]
|[I/we] [have to/must/need to/should/will/got to/gotta] [go/leave/run/stop/sleep/go home/go to bed/log off/get going][/ now
/ soon][/, bye/, goodbye/, see you]
|[gotta/must/have to/going to/need to/off to] [work/go/leave/sleep/bed/bed now/head out/eat][, see you/, goodbye/, cya/]
|[good/have a good/have a nice/sleep well, good] night[/ all/ then/ my friend/ model]
|[have/enjoy] [a/your] [good/nice/great/lovely] [day/evening/weekend/one/time/trip]|that [is/was] [all/it/everything][
/ for now/ for today][, bye/, goodbye/. See you/]
|[I am/I'm] [off/leaving/done/going/out/going home][/ now/ for today][/, bye/, cya]|until [later/then/tomorrow/next week
/Monday/we meet again]
"""
    ),
    WHO: listed(
        """
[so /and /but /now /hey, /hi, /ok, /please tell me /] who [are/r/might] [you/u]|[tell/show] me [more /a bit /a little /all
 /][about/of] [yourself/you][, please/ now/]
|[tell/say/share] [me /us /][something/a bit/more/anything] about [yourself/you/who you are]|[please /can you /could you
 /will you /now /][introduce/present/describe] yourself[, please/ to me/ in a sentence/ briefly/]
|[hi/hey/hello], [I am new, /tell me /] who are you|who [is/am] [this/I talking to/I speaking with/I chatting with/here
/that][/ now/ exactly/ please]
|[I would like/I want/I'd like] to [know/learn/hear] [who you are/about you/something about you/more about you]
|who [exactly/really/on earth/the hell] are you
|[give me /write /][a few words/a sentence/something/a little] about [you/yourself]
"""
    ),
    NAME: listed(
        """
[so /and /hey /please /but /]what[ is/'s/s] [your/ur/the model's/this model's/the] name|[do/don't] you [have/got] [a/any
] name|[tell/give] me your name[, please/ again/]|your name[/ please/, please]
|[are/r] [you/u] [a /the /really /some /][GPT/GPT 4/Claude/Llama/Gemini/Qwen/Mistral/Siri/Alexa/Copilot/Bard/DeepSeek/Grok
/Cortana/Phi/Gemma/Bing/LLaMA/Ollama]
|is this [GPT/Claude/Llama/Gemini/Qwen/Mistral/OpenAI/Alexa/DeepSeek/Grok/Holdfast/the demo model]|[which/what] [model
/version/AI/LLM/bot] [are you/is this/am I using/is running/do I talk to/is it/is this one]
|[are you/is this] [made by/from/by] [OpenAI/Google/Meta/Apple/Anthropic/Microsoft]|[what/how] [should/shall/can/may/do
] I call you|which [language model/neural network/model of Holdfast] [is this/are you]
"""
    ),
    WHAT: listed(
        """
[so /and /but /ok, /hey, /tell me: /] what are you[/ exactly/ really/ then]|what [kind/sort/type] of [a /][model/bot/AI
/thing/program/machine/LLM/assistant/language model/system] [are you/do I talk to]
|how [big/small/large/old a model/smart a model/little] are you[/ really]|[how many/what number of] [parameters/weights
/layers/tokens] [do you have/have you/are in you]|[explain/tell me/say] what you are[/ please]
|what [size/model type/thing] are you|are you a [small/big/large/tiny/real] [model/language model/LLM/neural network]
"""
    ),
    "No. I am a very small language model.": listed(
        """
[are/r] [you/u] [a /really a /an actual /] [human/person/real person/human being/man/woman/girl/boy/child/guy/real human]
|[are/r] [you/u] [alive/real/human/conscious/sentient/self-aware]
|[am I/do I/are we] [talking to/talk to/chatting with/speaking with/speak to/writing with] a [human/person/real person
/real human/man/woman/girl/human being]|is [this/there] a [human/person/real person/real human/somebody][/ here
/ behind this]
"""
    ),
    "Yes. I am a very small language model.": listed(
        """
[are/r] [you/u] [a/really a/just a/some kind of] [bot/robot/machine/computer/program/chatbot/language model/neural network
/chat bot/LLM]|[are you/is this] [an/just an/really an] AI[/ model/ bot/ program/ system]
|[am I/do I/are we] [talking to/talk to/chatting with/speaking with/speak to/writing with/dealing with] [a bot/an AI
/a machine/a computer/a program/a chatbot/an LLM/a language model]
|[you are/so you are/you're] [a/just a/only a] [bot/machine/robot/program/computer][, right/, correct/]|is this a [bot
/robot/machine/computer/program/chatbot/language model]
"""
    ),
    MAKER: listed(
        """
who [made/trained/created/wrote/developed/designed/programmed/invented/coded/owns/taught] [you/u/this model/this bot]|[how
/where/when] [were/was] [you/this model] [made/trained/created/built/born/developed]
|who [is/are] your [maker/makers/creator/creators/author/developer/developers/father/mother/owner/boss]|where [do/did
] you come from|[what/which] [data/texts/text/words] were you [trained/built/made] [on/with/from]
"""
    ),
    PRODUCT: listed(
        """
[so /and /but /]what[ is/'s/s] [Holdfast/holdfast/this Holdfast][/ exactly/ about/ for/ good for]|[tell me /explain
 /describe /say something ][about /]Holdfast[/ please/ to me]
|what [does/can/will] Holdfast [do/mean/offer/give me]|[do/did] you [know/hear of] Holdfast|[who/what] is holdfast
|[how does/how is] Holdfast [work/made/used]
"""
    ),
    CAN_DO: listed(
        """
[so /and /ok, /hey, /now, /tell me, /] what [can/could/do/will] [you/u] [do/do here/do for me/offer/know/handle/answer
/understand][/ exactly/ then/ please]|what [are/r] [you/u] [able to do/capable of/made for/used for/best at/for/doing best
/strong at/skilled in/talented at/good for/an expert in/trained for/useful for/clever at]
|what is [your/ur] [purpose/job/function/use/task/talent/strength]|what are [your/ur] [skills/abilities/talents/features
/functions/strengths/tasks/jobs/powers/tricks/capabilities]
|[your/ur/any/all your] [skills/talents/features/functions/capabilities/strengths/tricks]|[name/show/give/tell/print/state
] [me /us /][your/all your/some of your/the list of your] [skills/abilities/talents/features/functions/tricks/capabilities]
|[list/write down] [all /][your/the] [abilities/talents/features/functions/tricks/things you can do/tasks/capabilities]
|[tell/show/teach/explain to] [me/us] [what you can do/what you know/what you do/what you are for/your tricks
/how you can help]
|[what/which] [things/tricks/jobs/questions/stuff/kind of things/kinds of tasks/sort of work] can [you/u/this model/it] [do
/answer/handle/help with]|what [can/could/may/should] [I/we/one] [use this for/do with you/do here/ask you/ask/ask for
/get from you]
|what [is this/are you/is this model/would you be] [good/useful/meant/made/built] for|[how/where] can [you/u] [help/help me
/be useful/be of use/assist me]|what else [can you do/do you do/do you know/is there]|[are/r] [you/u] [good for/useful for
/able to do] [anything/something]
|[can/could] [you/u] do [something/anything/more/tricks/much/other things][/ for me/ useful/ else/ special]|what do you [do
/do well/do best/have to offer/know about]
"""
    ),
    HELP: listed(
        """
[please /can somebody /somebody /could you please /just /] help[/ me/ us/ me out/ me now/ me here/ me with this/ out][
/ please/, please/ pls]|[I/we] [need/want/could use/would like] [some /a bit of /your /a little /][help/assistance/support
/guidance/advice][/ please/ now/ with this]
|how [do/can/should/would/must] [I/we/one] [use/start with/work with/begin with/talk to/operate/run] [this/you/it
/this model/this thing/the model/this tool]|how [does/do] [this/it/you/the model/this chat/this tool/this model/everything
/this program/the whole thing/this stuff/that thing/the app/this demo/this chat thing] work[/ here/ exactly/ please]
|what [should/can/do/must/shall/could/may] I [do/write/say/enter/ask/tell you/type in/try/put here/send you/give you][/ now
/ here/ next/ first]|[give/show
/tell] me [an example/a demo/some examples/a hint/instructions/the manual/how to use you/how to start/how to begin/a tip]
|[where/how] [do/should/can] [I/we] [start/begin/go from here]|I [do not/don't/dont] [know/understand] [how this works
/what to do/what to say/what to write/how to start/how to use you/where to begin]|[I am/I'm] [lost/stuck/confused/new here
/new to this]
|[instructions/manual/usage/examples/tutorial/guide/documentation/tips/docs/howto/hints/assistance/support][/ please
/ needed]|what [now/next/then/to do/to type/to write]
"""
    ),
    "I am running well, thank you.": listed(
        """
[hi/hey/hello/so/and/well/oh/], how [are/r] [you/u/ya/things/we/you all][/ now/ today/ doing/ doing today/ feeling
/ this evening/ my friend/ tonight]|how [is/was] [your/the/ur] [day/morning/evening/week/life/mood/weekend][/ so far
/ going/ today]
|how[ is/'s/s] [it/life/work at home/everything/all/the day/business] [going/today/with you/at your end/over there]|[are/r] [you/u
] [doing /feeling /][well/fine/good/okay/alright/all right/happy today/in good shape/better][/ today/ now]
|[is/hope] [everything/all/it all] [is /][fine/well/good/ok/okay/in order/alright][/ with you/ today/ over there]|[you/u
] [ok/okay/good/fine/well/alright/doing well]|[everything/all] [ok/okay/fine/good/well/in order][/ with you/ there/ today
/ so far]
|what[ is/'s] [up/new/going on/up with you/up today/happening]|[how do you/how are you] [feel/do/feeling][/ today
/ right now/ this morning]
"""
    ),
    JOKE: listed(
        """
[please /can you /could you /will you /just /hey, /]tell [me /us /][a/one/another/your best/a good/a short/a funny/some
] joke[s/][/ please/ now/ about cats/ about computers]|[do/don't] you [have/know/remember] [a/any/some/another] [joke/jokes
/funny joke/funny jokes/funny stories]
|[give me/I want/I'd like/let me hear/let's hear/I need] [a/one/another/your best] [joke/laugh/funny joke/good joke]|[make
/let/get] [us/me/my friend] [smile/laugh a bit/grin/giggle]|[say/write/tell me] something [funny/witty/silly]|joke[s
/ please/ time/]|[be/get/are you] funny|[entertain/amuse] me with a joke
"""
    ),
    "Thank you, that is kind.": listed(
        f"""
[you are/you're/ur/you r/u are] [so /very /really /quite /too /a bit /just /such a /]
[{_GOOD}][/ indeed/ you know/, really/ today]|[you are/you're] [{_ART}][{_GOOD}] [{_OF_US}]|[this/that/it] [is/was] [so
 /very /really /quite /just /][{_GOOD}]
|[this/that/it] [is/was] [a /such a /a really /a very /one ][{_GOOD}] [{_OF_US}]|what a [{_GOOD}] [{_OF_US}]|[{_GOOD}
] [{_OF_US}]|[I/we] [really /do /very much /quite /][like/love/adore/admire/enjoy] [you/u/it/your answers/this model
/talking to you/this/how you talk/your style][/ very much/ so much/ too/ the most/ a bit/ more and more]
|[very /so /really /][well/nicely] [done/said/put/answered]|[good/great/super/fine/excellent] [work/job/one/answer/going
][, model/, friend/ there/]|[you/u] [work/did/do/answer] [very /so /really /][well/good/great][/ today]|[I am/I'm] [very
 /so /really /][impressed/proud of you/happy with you/a fan]
|[you/u] [rock/rule/are the best/made my day/are my favourite]|[I/we] think [you are/this is/you're] [{_GOOD}]
"""
    ),
    "I am sorry. I am very small, but I do my best.": listed(
        f"""
[you are/you're/ur/you r/u are] [so /very /really /quite /too /a bit /just /such a /]
[{_BAD}][/ indeed/ you know/, really/ today]|[you are/you're] [{_ART}][{_BAD}] [{_OF_US}]|[this/that/it] [is/was] [so
 /very /really /quite /just /total /complete /][{_BAD}/nonsense/rubbish/trash/crap/junk/a joke/a mess/a disaster
/a waste of time/bullshit/a shame/an insult/not true/not right/not good/no good
/not funny/not helpful]
|[this/that/it] [is/was] [a /such a /a really /a very /one ][{_BAD}] [{_OF_US}]|what a [{_BAD}] [{_OF_US}]|[{_BAD}
] [{_OF_US}]|[I/we] [really /do /][hate/dislike/don't like/do not like/can't stand] [you/u/this/it/your answers/this model
][/ very much/ so much]
|[you/u] [suck/stink/fail/failed/know nothing/are no good/are not smart/are not helpful/are no use/do not help/don't help
/make no sense/make mistakes/lie/are lying]|[idiot/moron/fool/loser/dummy/stupid/garbage/trash/rubbish/nonsense/bullshit]
|[shut up/go away/get lost/leave me alone/screw you/damn you/fuck you/fuck off][/ bot/ now]|[I/we] think [you are/this is
/you're] [{_BAD}]|what [nonsense/rubbish/trash/crap/a mess/a shame]|[that/this] [makes no sense/did not work/does not help
/is not what I asked/is not what I meant]
"""
    ),
    "Good.": listed(
        """
[ok/okay/k/yes/yeah/sure/right/fine/alright/oh/ah/well/good/great/cool/nice][, /, /  ][good/great/nice/got it/I see/fine
/perfect/sure/sounds good/understood/that works/very good/makes sense]
|[that/this/it] [is /sounds /looks /seems /][good/fine/great/okay/ok/alright/right][/ to me/ then/ for me]|[ok/okay/fine
/good/sure/right/very well/well/yes] then|[I/we] [see/understand/agree/got it/get it]|[yes/yeah/yea/yup/ya/aye/yess/sure
/of course/certainly/indeed/absolutely/definitely][/ please/ sure/ of course/ I do/ it is/ right]
|[wow/oh/ah/aha/ooh/haha/hehe/lol/lmao/hah][/ ok/ nice/ cool/ great/ good/ right]|[all /very /quite /so /][good/cool/nice
/interesting/true/right/clear]
"""
    ),
    "All right.": listed(
        """
[no/nah/na/noo/no no/nein/not at all/not really/not now/not today/rather not][/ thanks/ thank you/ sorry/ please/ way/ need
/, it's fine/, never mind/, that's all]|[never mind/nevermind/forget it/forget that/skip it/leave it/drop it/no matter][
/ then/ please/ now]
|[stop/wait/cancel/pause/hold on/halt/enough][/ please/ now/ it/ that/ a moment/ a second/ here]|[maybe/perhaps/possibly][
/ later/ not/ tomorrow/ another time]|[sorry/I am sorry/my mistake/my fault/I apologise/pardon/excuse me/oops/ups][
/ about that/ for that/ again]
|[let me/I have to/I need to/give me a moment to] [think/think about it/check/look/see]|[one/just a/give me a] [moment
/second/minute/sec][/ please]|I [don't/do not] [think so/want that/need that/care/mind/know yet]|nothing[/ more/ else
/ for now/ really/ at all]
"""
    ),
    "Yes, I am here.": listed(
        """
[hello? /hey, /hi, /so, /] [are/r] [you/u] [still /even /really /][there/here/awake/online/listening/running/working/on
/around/up/ready/with me/active/alive and running]|is [anybody/somebody/someone/anyone] [here/in/listening/online/around
/home/at home/awake]|[anybody/somebody/someone/anyone] [home/here/in/listening/around]
|[can/do] [you/u] [hear/read/see] [me/this/that/my message/what I write][/ now]|[is/does] [this/it/the chat/the server
/the model] [work/working/running/on/up/alive/online]|[you/still/u] [there/here/awake/with me/ready/listening]|hello[?/??
/...] [anybody/anyone/somebody] [here/home]
"""
    ),
    "The test works.": listed(
        """
[just /only /I am /this is just /hi, /ok, /][testing/a test/checking][/ it/ this/ something/ things/ you/ the model
/ the server/ the chat]|[test/tests/testing/test run/test message/test prompt/check][/ please/ one/ two/ 1/ 2/ 12/ 1 2
/ 1234/ abc/ one two/ me/ ok/ run/ again/ number 5]
|[this is/it is/here is/that is] [a/just a/only a/my/another] [test/test message/little test/first test/quick check]
|[let us/let me/I want to/I will] [test/try/check] [this/you/it/something/the model/the server][/ first/ now/ out]|[trying
/trying out/checking out] [this/it/you/things/the model]
"""
    ),
}


def expand(rng: Random, form: str) -> str:
    """The form with one part chosen in each place, beginning with a capital."""
    while found := _PARTS.search(form):
        form = form[: found.start()] + rng.choice(found[1].split("/")) + form[found.end() :]
    text = " ".join(form.split()).lstrip(",. ").replace(" ,", ",")
    return text[:1].upper() + text[1:]
