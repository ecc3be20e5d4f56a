"""Unusual words for tools and files, so that every token of the vocabulary must be copied.

`words.invent` uses a hundred syllables. A model trained on it alone never writes most tokens and
cannot copy them: it chose the right tool but misspelled its name.
"""

from __future__ import annotations

from random import Random

import words

VERBS = (
    "accept activate adjust align analyse answer append apply approve archive arrange ask assemble "
    "assign attach audit back "
    "balance ban begin bind block blend boil boost borrow brew bring broadcast brush bundle burn "
    "cancel capture carry carve "
    "cast catch change charge chart check choose classify clean clear climb clone close collect "
    "combine compare compile "
    "compress compute configure confirm connect convert cook copy correct count crop cut debug "
    "decode decrease define delete "
    "deliver deny deploy describe design detect diff dim disable discover dispatch display divide "
    "download draft draw drive "
    "drop dry duplicate dump edit eject empty enable encode encrypt end enqueue enrol erase "
    "estimate evaluate examine execute "
    "expand explain export extract fetch fill filter find finish fix flag flash flush fold follow "
    "forward freeze gather "
    "generate get give grant graph grep grind grow guess halt hang harvest heat hide highlight "
    "hold identify ignore import "
    "improve include increase index inspect insert install invite iron join judge jump keep kick "
    "knit label lend lift limit "
    "link list load locate lock log make map mark match measure melt merge mix modify monitor "
    "mount move mute name navigate "
    "notify obtain offer open optimise order organise pack park parse pause pay pick pin place "
    "plan play plot poll post pour "
    "predict prepare press preview print process produce promote prune publish pull purge push put "
    "query queue quit quote "
    "raise rank rate reach read rebuild recall receive record recover reduce refresh refund "
    "register reject release reload "
    "remove rename render renew repair repeat replace reply report request reserve reset resize "
    "resolve restart restore "
    "resume retrieve retry return reverse revert review ring roll rotate round run sample save "
    "scan schedule score scrape "
    "search seal select send serve set shape share sharpen ship show shrink shuffle shut sign "
    "simulate skip slice smooth "
    "solve sort spin split squash stack stage start steer stop store stretch submit subscribe "
    "suggest summarise suspend swap "
    "sweep switch sync tag tally teach terminate test throw tie tilt toast toggle trace track "
    "train transfer transform "
    "trigger trim tune turn twist undo unlock unpack update upgrade upload use validate verify "
    "view visit wake walk warm wash "
    "watch weigh wipe withdraw wrap write zip zoom"
).split()

NOUNS = (
    "account actor address adviser aircraft airport alarm album alert alias analysis anchor answer "
    "apartment archive arrow "
    "article asset attachment auction audience author backup bakery balloon bandwidth banner "
    "barrel basin battery beach "
    "beacon beam belt bench bicycle bill blanket block blueprint board boat bolt bonus booking "
    "border boundary branch brand "
    "breakfast bridge broker browser brush bucket budget buffer bug building bundle burger bus "
    "button cabin cable cache "
    "calendar campaign canal candidate canvas capacity captain carbon card cargo cart cartridge "
    "castle category cathedral "
    "ceiling cell certificate channel chapter character chart chassis check checkpoint chimney "
    "choir church cinema circle "
    "circuit citizen claim class client cliff climate clinic cloud cluster coast coffee collection "
    "column comment commit "
    "committee company compass complaint component composer computer concept condition conductor "
    "config connection contact "
    "container contest contract copper copyright corner corridor cottage coupon course court crate "
    "credit cupboard cursor "
    "curtain curve customer cycle dashboard database dataset deadline deal debt decision degree "
    "delivery demand density "
    "deposit depth desktop detail device diagram diary dictionary diet digest dimension directory "
    "discount disease disk "
    "distance district domain donation download drawer drill driver dust duty earthquake economy "
    "edge effect elevator email "
    "emergency employee endpoint energy engine entity entry envelope episode equation error "
    "estimate evidence exam example "
    "exception exhibit expense experiment extension fabric factory failure farm feature feedback "
    "ferry festival field figure "
    "filter finding fingerprint firewall flag fleet flood fleece flour flow folder font footage "
    "footpath forecast forest fork "
    "form format formula fountain fraction frame freight frequency fridge fuel function furnace "
    "gadget gallery game garment "
    "gas gate gauge genre ghost gift glacier glass glossary glove goal grade graph gravel grid "
    "group guest guide gutter habit "
    "hammer handle harbour hardware harvest hash headline heater heading height helmet highway "
    "hinge history holiday honey "
    "horizon hospital household humidity icon idea image inbox income index infection ingredient "
    "inspector instance "
    "instrument interface interval inventory invitation island issue jar jigsaw job journal "
    "journey judge jungle junction "
    "keyboard kernel kingdom kit knot label lake landlord language lantern laptop laser laundry "
    "layer layout leaf league "
    "lecture ledger legend length letter library licence light limit link liquid litter loan lobby "
    "location locker log loop "
    "lounge luggage lunch machine magazine magnet mailbox manager manual marble margin market mask "
    "material matrix meadow "
    "measure mechanism medal medicine member memory menu merchant merge message metal method "
    "metric microphone milestone "
    "mineral minister mirror mission mixer mobile module moisture monitor monument mortgage mosaic "
    "motor mountain museum "
    "music namespace napkin needle neighbour network newspaper node noise notebook notice novel "
    "nozzle nutrient object ocean "
    "offer offset opera operator option orbit orchard orchestra organ origin outlet output oven "
    "owner oxygen package packet "
    "paddle palace panel paper parade parcel parent parking parliament parser part partner passage "
    "passenger passport "
    "password patch patent path patient pattern pavement payment peak pedal pen penalty pension "
    "percentage permission "
    "petition phase phrase physician piano picture pigeon pipe pipeline pitch pixel plaster plate "
    "platform player plot plugin "
    "pocket podcast poem policy pollen pond portal portrait position postcard poster potato powder "
    "prayer prefix premium "
    "prescription pressure priority prize problem processor product profit program project promise "
    "proof property proposal "
    "protein protocol proxy puddle pulse pump pupil puzzle pyramid quality quantity quarry query "
    "queue quiz quota radar radio "
    "railway rainfall range ratio reaction reactor reader reason rebate receipt region register "
    "registry relation remark "
    "reminder repository reservation resource response restaurant result retailer revenue ribbon "
    "ride ring ripple risk river "
    "road rock role roof root rotor routine row rule runner runway saddle safety salad salary "
    "sample sandwich satellite sauce "
    "scale scanner scene schedule schema scholar screen script sculpture seal season section "
    "sector segment sensor sentence "
    "sequence series service session setting shadow shape shard share shelf shell shield shift "
    "shipment shirt shoulder shower "
    "shuttle sidewalk signal signature silence sink sketch skill slide slot snapshot snippet soap "
    "socket software soil "
    "soldier solution source spark speaker species speech speed spice spider sponsor spot "
    "spreadsheet spring squad square "
    "stadium staff stage stairs stamp standard statement station statue steam step stomach stone "
    "storage storm strategy "
    "stream street string structure student studio subject subscription suburb subject suffix "
    "sugar suitcase sum summary "
    "supplier surface surgeon survey switch symbol symptom syntax syrup system table tablet talent "
    "tank target tariff taxi "
    "technique telescope temperature temple tenant tension terminal territory theatre theme theory "
    "thermostat thread threat "
    "throat thumbnail ticket tide tile timeline timestamp tissue title toast tobacco toilet token "
    "tongue tool topic torch "
    "total tournament tower town track traffic trailer transaction transcript transition transport "
    "trash treasure treaty "
    "trend triangle tribe trigger trolley trousers truck trunk tube tunnel turbine tutor type "
    "umbrella uniform union universe "
    "unit upload url user usage vaccine valley valve van variable vault vector vehicle vendor "
    "venue version vessel video "
    "village vinegar violin virus visa visitor voice volcano voltage volume vote voucher voyage "
    "wage waiter walk wall "
    "wardrobe warehouse warning warranty waste wave weapon website wedding weight wheel whistle "
    "widget width wildlife wind "
    "window winner winter wire wisdom witness wizard wolf wood workflow workspace wound wrapper "
    "wrist yacht yard yarn zone"
).split()

OTHERS = (
    "abstract acid active actual ancient angry annual atomic automatic average bare basic bitter "
    "blind bold brave brief "
    "bright broad broken busy calm capable careful central cheap chief civil classic clever cold "
    "complex cool crazy crisp "
    "crude cruel curious current daily dark deep delicate dense different digital direct dirty "
    "double dual dynamic eager "
    "early eastern easy elder elegant empty entire equal exact extra faint fair false familiar "
    "famous fancy fatal final firm "
    "fixed flat flexible foreign formal fresh frozen full funny fuzzy general gentle giant global "
    "good grand great guilty "
    "handy happy harsh heavy helpful hidden hollow honest huge humble hungry ideal idle illegal "
    "immediate inner internal "
    "jealous joint junior keen kind known large late lazy legal limited liquid little live lonely "
    "long loose loud lovely "
    "lucky mad major manual massive mature maximum medium mental merry middle mild minimum minor "
    "missing modern moist monthly "
    "moral mutual naked narrow nasty native naval neat nervous next nice noble normal northern "
    "nuclear obvious odd official "
    "open orange ordinary outer overall pale partial past patient perfect permanent plain pleasant "
    "polite popular precise "
    "pretty previous primary prime private proper proud public pure quick quiet random rapid rare "
    "raw ready real recent "
    "regular remote rich rigid ripe robust rough royal rude rural sacred sad safe secret senior "
    "separate serious severe "
    "shallow sharp short shy silent silly similar simple single smart smooth social soft solar "
    "solid sour southern spare "
    "special stable static steady steep sticky stiff straight strange strict strong stupid subtle "
    "sudden super sweet swift "
    "tall temporary tender thick thin tight tiny total tough toxic tropical true ugly unique upper "
    "urban urgent usual vague "
    "valid vast verbal vertical violent virtual visible visual vital vivid warm weak wealthy "
    "weekly western wet whole wicked "
    "wide wild wise wooden worth wrong yellow young zero january friday tomorrow yesterday "
    "northwest gmail github linux "
    "debian ubuntu docker python javascript typescript kubernetes postgres redis nginx apache "
    "mysql sqlite bash numpy pandas "
    "pytest webpack utf ascii json yaml toml http https localhost alpha beta gamma delta omega "
    "sigma lambda kappa theta foo "
    "bar baz qux quux lorem ipsum dolor amet"
).split()

HELD_OUT = frozenset(
    "water waters watered watering plant plants exchange exchanges currency currencies launch "
    "launches rocket rockets "
    "planet planets crew crews ficus monstera cactus euro euros yen krona peso pesos mars venus saturn".split()
)
"""Words of the tools that `questions.strange_tools` asks about: nothing in the new conversations
holds one.
"""

_ONSETS = (
    "b bl br c ch chr cl cr d dr dw f fl fr g gh gl gn gr h j k kh kl kn kr l m mc n p ph pl pr ps "
    "q qu r rh s sc sch scr sh "
    "shr sk sl sm sn sp spl spr squ st str sv sw t th thr tr ts tw v vl w wh wr x y z zh"
).split()
_NUCLEI = (
    "a aa ae ai au aw ay e ea ee ei eu ew ey i ia ie io o oa oe oi oo ou ow oy u ua ue ui y".split()
)
_CODAS = (
    "b ck ct d dge f ff ft g gh ght k l ld lf lk ll lm lp lt m mb mp n nce nch nd ng nk ns nt p pt "
    "r rb rce rd rf rg rk rl rm "
    "rn rp rs rt s sh sk sm sp ss st t tch th v ve x z zz able age al ance ary ate ed el en ence "
    "er ery ess est et ful ia "
    "ible ic ically ify ing ion ious ism ist ity ive ization le less ly ment ness or ory ous ship "
    "sion tion ture ual ular ure "
    "ward wise"
).split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SMALL = (
    "what which whose where when how here there they them these this that the a an and or but you "
    "your my our it its one ones "
    "some each many much more about from for with within by on in at of to have has had are is was "
    "does did like likes lives "
    "called named given please tell give say repeat count keep remember thanks thank hello "
    "question notes tools item year "
    "time required object integer arguments properties parameters description command function "
    "functions assistant system "
    "user content text result enum"
).split()
_OLD = [
    *words.NAMES, *words.CITIES, *words.COLOURS, *words.THINGS, *words.JOBS, *words.PLACES, *words.FOODS, *words.ANIMALS,
    *words.HOBBIES, *words.MONTHS, *words.DAYS, *words.LANGUAGES, *words.EVENTS, *words.ATTRIBUTES, *words.STEMS,
]  # fmt: skip
_ENGLISH = [*VERBS, *NOUNS, *OTHERS]
_COPIED = [*_ENGLISH, *_ENGLISH, *_SMALL, *_OLD]


def is_allowed(text: str) -> bool:
    """Whether the text contains no held-out word, even joined to others."""
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    return not any(word in flat for word in _HELD_OUT_ROOTS) and not HELD_OUT & set(_parts(text))


_HELD_OUT_ROOTS = tuple(word for word in sorted(HELD_OUT) if len(word) > 5)


def _parts(text: str) -> list[str]:
    """The words of a text in lower case; camelCase is split."""
    spaced = "".join(
        f" {letter}" if letter.isupper() else letter if letter.isalpha() else " " for letter in text
    )
    plain = "".join(letter if letter.isalpha() else " " for letter in text)
    return [*spaced.lower().split(), *plain.lower().split()]


def _syllables(rng: Random) -> str:
    word = rng.choice(_ONSETS) + rng.choice(_NUCLEI)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        word += rng.choice(_ONSETS) + rng.choice(_NUCLEI)
    return word + (rng.choice(_CODAS) if rng.random() < 0.75 else "")


def _blend(rng: Random) -> str:
    """The beginning of one word and the end of another."""
    first, second = rng.choice(_ENGLISH), rng.choice(_ENGLISH)
    return (
        first[: rng.randint(2, max(2, len(first) - 1))]
        + second[-rng.randint(2, max(2, len(second) - 1)) :]
    )


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_ENGLISH)
    if kind < 0.7:
        return _blend(rng)
    if kind < 0.87:
        return _syllables(rng)
    if kind < 0.96:
        return words.invent(rng)
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 7)))


def wide_word(rng: Random) -> str:
    """A lower-case word: English, two joined halves, syllables or letters."""
    while True:
        if is_allowed(word := _any_word(rng)):
            return word


def english(rng: Random) -> str:
    """An English word."""
    return rng.choice(_ENGLISH)


def noun(rng: Random) -> str:
    """An English noun, or sometimes any word."""
    return rng.choice(NOUNS) if rng.random() < 0.6 else wide_word(rng)


def verb(rng: Random) -> str:
    """An English verb, or sometimes any word."""
    return rng.choice(VERBS) if rng.random() < 0.7 else wide_word(rng)


def code(rng: Random) -> str:
    """A password, key, hash or similar text."""
    kind = rng.randrange(7)
    if kind == 0:
        return (
            "".join(rng.choice(_LETTERS.upper()) for _ in range(rng.randint(1, 4)))
            + "-"
            + words.digits(rng, 2, 5)
        )
    if kind == 1:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(6, 10)))
    if kind == 2:
        return f"{wide_word(rng)}{words.digits(rng, 1, 4)}"
    if kind == 3:
        return f"{wide_word(rng)}-{wide_word(rng)}"
    if kind == 4:
        return "".join(
            rng.choice(_LETTERS + _LETTERS.upper() + "0123456789") for _ in range(rng.randint(4, 9))
        )
    if kind == 5:
        return f"v{rng.randint(0, 20)}.{rng.randint(0, 30)}.{rng.randint(0, 9)}"
    return f"{wide_word(rng)}_{wide_word(rng)}".upper()


_MARKED = (
    """"{a}" ; "{a}" ; "{a} {b}" ; '{a}' ; >={n} ; >={n},<{p} ; =={n}.1 ; ~{n} ; 10.0.{n}.1 ; 127.0.0.1:{p} ; ["{a}", "{b}"] ; """
    "[{a}, {b}] ; {a}://{b}/{a} ; https://{a}.{b}.io:{p} ; ${{{up}}} ; {{{a}: {b}}} ; ({a}, {b}) ; "
    "{a}[{p}] ; <{a}> ; {a}@{b} ; "
    "#{k} ; {a}/*.{b} ; {a} + {b} ; !{a} ; {a}% ; -{a} ; --{a}={b} ; {a}.{b}() ; f'{a} {{{b}}}' ; "
    "{a} -> {b} ; {a} | {b} ; "
    "{a} = {{}} ; \\{a} ; {a}?{b}=1&x={n} ; ^{a}$ ; ~/{a}"
)
"""Values with the marks that settings and programs are full of."""


def marked(rng: Random) -> str:
    """Words between the punctuation of settings and programs."""
    word, other = wide_word(rng), wide_word(rng)
    number = f"{rng.randint(0, 99)}.{rng.randint(0, 30)}"
    many = _MARKED.format(
        a=word, b=other, n=number, p=rng.randint(80, 9999), up=word.upper(), k=code(rng)
    )
    return rng.choice(many.split(" ; "))


def wide_value(rng: Random) -> str:
    """A word, name, number or code without spaces."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(_COPIED)
    if kind < 0.45:
        return wide_word(rng)
    if kind < 0.65:
        return wide_word(rng).capitalize()
    if kind < 0.72:
        return wide_word(rng).upper()
    if kind < 0.8:
        return words.digits(rng)
    return code(rng) if kind < 0.95 else words.token_like(rng)


def wide_phrase(rng: Random, most: int = 5) -> str:
    """One to `most` words."""
    return " ".join(
        wide_word(rng) if rng.random() < 0.8 else wide_value(rng)
        for _ in range(rng.randint(1, most))
    )
