"""LaTeX formulas as Unicode text, for a terminal: `\\frac{1}{\\sqrt{d}} x^2` is 1/√d x²."""

from __future__ import annotations

import re
import unicodedata

SUPERSCRIPTS = dict(zip("0123456789+-=()ninhjkmtTLDNHVo'", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱⁿʰʲᵏᵐᵗᵀᴸᴰᴺᴴⱽᵒ′", strict=True))
SUBSCRIPTS = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ",
    "eta": "η", "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ",
    "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "varphi": "φ", "chi": "χ",
    "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ",
    "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
}  # fmt: skip
SIGNS = {
    "cdot": "·", "times": "×", "otimes": "⊗", "odot": "⊙", "oplus": "⊕", "circ": "∘", "le": "≤", "leq": "≤", "ge": "≥",
    "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "sim": "~", "equiv": "≡", "propto": "∝", "in": "∈", "notin": "∉",
    "subset": "⊂", "subseteq": "⊆", "cup": "∪", "cap": "∩", "to": "→", "rightarrow": "→", "Rightarrow": "⇒",
    "implies": "⇒", "iff": "⇔", "mapsto": "↦", "leftarrow": "←", "infty": "∞", "sum": "Σ", "prod": "Π", "int": "∫",
    "partial": "∂", "nabla": "∇", "pm": "±", "mp": "∓", "ldots": "…", "dots": "…", "cdots": "⋯", "vdots": "⋮",
    "ddots": "⋱", "top": "ᵀ", "intercal": "ᵀ", "prime": "′", "lVert": "‖", "rVert": "‖", "Vert": "‖", "|": "‖",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉",
    "langle": "⟨", "rangle": "⟩", "forall": "∀", "exists": "∃", "star": "⋆", "ast": "*", "ll": "≪", "gg": "≫",
    "ell": "ℓ", "quad": "  ", "qquad": "    ", ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "{": "{", "}": "}",
    "%": "%", "_": "_", "$": "$", "#": "#", "&": "&", "left": "", "right": "", "big": "", "Big": "", "bigl": "",
    "bigr": "", "Bigl": "",
    "Bigr": "", "displaystyle": "", "textstyle": "", "limits": "", "nolimits": "", "lbrace": "{",
    "rbrace": "}", "setminus": "∖", "land": "∧", "lor": "∨", "neg": "¬", "bigg": "", "middle": "", "colon": ":",
    "lt": "<", "gt": ">", "quot": '"', "emptyset": "∅", "perp": "⊥", "parallel": "∥", "deg": "°", "cong": "≅",
}  # fmt: skip
LETTERS = {"R": "ℝ", "N": "ℕ", "Z": "ℤ", "C": "ℂ", "E": "𝔼", "P": "ℙ", "1": "𝟙"}
STYLES = {"text", "mathrm", "mathbf", "mathit", "mathcal", "operatorname", "boldsymbol", "bm", "textbf", "mathsf"}
STYLES |= {"mathtt", "textrm", "texttt", "operatorname*", "underbrace", "overbrace", "boxed", "mbox"}
ACCENTS = {"hat": "\u0302", "bar": "\u0304", "tilde": "\u0303", "vec": "\u20d7", "overline": "\u0304", "dot": "\u0307"}
ACCENTS |= {"widehat": "\u0302", "widetilde": "\u0303"}
TOKEN = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}|\\\\(?:\[[^\]]*\])?|\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)


def to_unicode(latex: str) -> str:
    """The formula as readable text; commands without a sign keep their name.

    >>> from regard.book.unicode_formulas import to_unicode
    >>> to_unicode(r"\\frac{1}{\\sqrt{d}} \\le x^2, \\; A^\\top W_{ij}")
    '1/√d ≤ x², Aᵀ Wᵢⱼ'
    """
    text = _Reader(latex).read_until(None)
    text = unicodedata.normalize("NFC", text)  # one sign for a letter with its accent
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())


class _Reader:
    """Reads tokens from left to right; each construct consumes its own arguments."""

    def __init__(self, latex: str) -> None:
        self.tokens = TOKEN.findall(latex)
        self.index = 0

    def read_until(self, end: str | None) -> str:
        parts: list[str] = []
        while self.index < len(self.tokens):
            token = self._next()
            if token == end:
                break
            parts.append(self._read(token))
        return "".join(parts)

    def _next(self) -> str:
        token = self.tokens[self.index]
        self.index += 1
        return token

    def _argument(self) -> str:
        """The next group or token."""
        while self.index < len(self.tokens) and self.tokens[self.index].isspace():
            self.index += 1
        return self._read(self._next()) if self.index < len(self.tokens) else ""

    def _read(self, token: str) -> str:
        if token == "{":
            return self.read_until("}")
        if token in ("^", "_"):
            return _raise(token, self._argument().strip())
        if token.startswith("\\\\"):
            return "\n"
        if token.startswith("\\begin"):
            return self._read_environment(token[7:-1])
        if token == "&":
            return " "
        return self._command(token[1:]) if token.startswith("\\") else token

    def _command(self, name: str) -> str:
        if name in ("frac", "tfrac", "dfrac"):
            above, below = self._argument(), self._argument()
            return f"{_group(above)}/{_group(below)}"
        if name == "binom":
            return f"C({self._argument()}, {self._argument()})"
        if name == "sqrt":
            return f"√{_group(self._argument())}"
        if name == "mathbb":
            letter = self._argument()
            return LETTERS.get(letter, letter)
        if name in STYLES:
            return self._argument()
        if name in ACCENTS:
            return self._argument() + ACCENTS[name]
        if name in GREEK:
            return GREEK[name]
        return SIGNS.get(name, f"{name} ")

    def _read_environment(self, name: str) -> str:
        body = self.read_until(f"\\end{{{name}}}")
        if name.endswith("matrix") or name == "array":
            rows = [" ".join(row.split()) for row in body.split("\n") if row.strip()]
            return f"[{'; '.join(rows)}]"
        return body


def _raise(sign: str, text: str) -> str:
    """A power or an index: in small letters where all of them exist."""
    if text and all(letter in "ᵀ′⋆*" for letter in text):
        return text
    small = SUPERSCRIPTS if sign == "^" else SUBSCRIPTS
    text = text.replace("−", "-")
    if text and all(letter in small for letter in text):
        return "".join(small[letter] for letter in text)
    return f"{sign}{text}" if len(text) == 1 else f"{sign}({text})"


def _group(text: str) -> str:
    """Parentheses around what would otherwise be read differently."""
    text = text.strip()
    simple = re.fullmatch(r"[\w.₀-₉⁰-⁹²³¹ᵀ′√ᵢⱼₖ]+|\([^()]*\)", text)
    return text if simple else f"({text})"
