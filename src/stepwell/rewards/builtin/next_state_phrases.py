"""The patterns of the rules of `next_state`, in English and Chinese."""

START = r"^\W*(?:(?:oh|ah|hm+|well|sorry|ok|okay|wait|hey|um+|uh+|please|and|so|yeah|but|hi|lol|ugh|actually)\b\W*)*"
"""The beginning of a message or of a line, with words that say nothing."""
REQUEST = r"(?:^|[.!?;,:\u2014-]\s*|\b(?:please|pls|can you|could you|just|and|now|to|then|let's|should|you)\s+)"
"""Where an order to the assistant begins."""

UNDO = (
    REQUEST + r"(?:undo|revert|roll\s?back)\b(?!\s+a\b)",
    REQUEST + r"(?:put|change|set|turn|switch|move|bring) (?:\w+ ){1,4}?back\b",
    REQUEST + r"(?:restore|go back to|return to|bring back) (?:the|it|that|my|what|how|them|everything)\b",
    REQUEST
    + r"(?:remove|delete|discard|drop|throw away|get rid of) (?:that|those|what you|the changes?|your changes?)\b",
    r"撤销|撤回|回滚|还原|改回|退回去|恢复(?:原|到|之前|成)",
)
NO_UNDO = (
    r"^\W*(?:how|what|why|when|which|is there|does|do|where)\b[^.!?]*\b(?:undo|revert|roll\s?back|restore)",
    r"如何(?:撤销|撤回|回滚|还原)",
)

CORRECTION = (
    START + r"(?:no+|nope|nah|wrong|incorrect|not (?:quite|really|right|exactly|that|this|correct|good|like))\b",
    r"\b(?:i|we) (?:actually |really |just |only |clearly |specifically |already )*"
    r"(?:meant|asked (?:you )?(?:for|to|about|if|not)|told you|was asking|was talking about)\b",
    r"\bi (?:already |just |clearly |specifically )*said\b",
    r"\bi (?:actually |really |just |only )*wanted\b(?! to (?:ask|know|thank|say|check|let|share))",
    r"\bnot what (?:i|we)\b|\bnot (?:at all )?what was asked\b",
    r"\b(?:that|this|it|these|those|which|answer|result|code|output)(?:'?s|'?re)? ?(?:is|are|was|were|looks?"
    r"|seems?)? ?"
    r"(?:still |just |completely |totally |simply |plain |also |clearly |obviously )*"
    r"(?:not (?:what|how|right|correct|it|true|the|working|helpful|good)|wrong|incorrect|inaccurate|nonsense"
    r"|useless)\b",
    r"\b(?:isn't|wasn't|aren't) (?:what|right|correct|how|it|true|the|working|helpful)\b",
    r"\byou(?:'ve| have)? (?:\w+ )?(?:misunderstood|misread|misunderstand|missed|ignored|forgot|forgotten"
    r"|overlooked|skipped"
    r"|broke|got (?:it|that|this|\w+) wrong)\b",
    r"\byou(?:'re| are) (?:wrong|mistaken|not listening|missing)\b",
    r"\byou (?:\w+ )?(?:didn't|did not|failed to|were supposed to|should have|shouldn't)\b",
    r"\b(?:that|this|it|which) (?:\w+ )?(?:doesn't|does not|didn't|did not|won't|isn't|still fails|still crashes)"
    r" ?(?:\w+ )?(?:work|help|compile|run|answer|fix|look right|make sense|solve|address|do)?\b",
    r"\bstill (?:wrong|broken|fails?|failing|not|incorrect|the same|getting|doesn't|crash\w*|see)\b",
    r"\b(?:try|do it|do that|start|think) (?:it )?(?:again|over)\b",
    r"\b(?:it|that|this|the \w+) should(?:n't| not)? (?:be|have been|say|return|read)\b",
    r"\b(?:please )?(?:don't|do not|stop|quit) (?:do|doing|add|adding|use|using|writ\w+|includ\w+|be|being|chang\w+"
    r"|touch\w*|mak\w+|repeat\w*|answer\w*|giv\w+|explain\w*|apologi\w+)\b",
    r"\bi (?:don't|do not|didn't|did not) (?:want|need|like|ask|mean|say)\b",
    r"\b(?:far |way |much |a bit |a little |really )?too (?:long|short|verbose|wordy|formal|informal|vague"
    r"|complicated|slow"
    r"|detailed|technical|generic|complex|simple|brief|chatty|much|many|casual)\b",
    r"\b(?:that|this|it) makes? no sense\b|\bmakes no sense\b",
    r"\bwhy (?:did|would|are|do) you\b",
    r"\b(?:are you sure|is that really (?:right|true))\b",
    START + r"(?:actually|rather|instead)\b[, ]+(?:it|i|the|that|use|make|no|we|please|give)\b",
    r"\binstead of\b.*\b(?:you|that|your)\b|\brather than what\b",
    r"\bi'd (?:rather|prefer)\b|\bi would (?:rather|prefer)\b|\bi prefer\b",
    r"^\W*(?:不(?!用|客气|必|好意思|过|错|是吗)|错了|错误|并不|不是)|不对|错了|我(?:是说|的意思是|说的是|要的是|想要的是|问的是)",
    r"(?:你|您)(?:理解错|搞错|弄错|误解|写错|忘了|没有?按)|(?:还是|仍然|依然)(?:不|错|报错|一样|没)|不是我(?:要|想|问)|重新(?:来|做|写|回答)",
    r"太(?:长|短|啰嗦|复杂|正式|笼统)了?|别(?:再|这样)|不要(?:再|这样|加|用)",
)
NO_CORRECTION = (
    START
    + r"no+\W+(?:thanks|thank you|problem|worries|need|questions?|more|rush|idea|doubt|way|further|other|issues?)\b",
    START
    + r"no+\W+(?:that|it|this|i|all|looks?|we|everything)(?:'?s|'m|'re| is| am| are)? (?:all|fine|good|great|ok|okay"
    r"|perfect|it|done|set|everything|enough|right|works)\b",
    START + r"not (?:bad|only|sure|a problem|to worry)\b",
    r"\bnothing (?:is )?wrong\b|\b(?:isn't|not) (?:too )?bad\b|\bdoesn't matter\b|\bit doesn't hurt\b",
    r"不错|没错|不用了|没问题",
)

THANKS = (
    START + r"(?:(?:great|cool|nice|wow|yes|yep|alright|perfect|wonderful|super|good|awesome|fine|right|got it"
    r"|works?)\b\W*)*"
    r"(?:many |a lot of )?(?:thanks|thank you|thank u|thx|tysm|ty|cheers|appreciated?|much appreciated|bless you)\b",
    r"\b(?:that|this|it)(?:'s| is| was)? ?(?:just |so |really |very |absolutely |actually )*(?:works|worked"
    r"|helps|helped"
    r"|did it|fixed|solved|did the trick|does the trick|helpful|amazing|fantastic|awesome|wonderful|brilliant"
    r"|excellent"
    r"|perfect|great|exactly (?:what|right|it)|what i (?:needed|wanted|was looking for|was after)|spot on)\b",
    START + r"(?:perfect|excellent|brilliant|awesome|amazing|fantastic|wonderful|superb|bravo|spot on|exactly (?:what"
    r"|right))\b",
    r"\b(?:great|good|nice|excellent|amazing|fantastic|solid|lovely) (?:job|work|answer|explanation|one|catch"
    r"|stuff)\b",
    r"\b(?:well done|love (?:it|this|that)|just what i|exactly what i|you(?:'re| are) (?:the best|awesome"
    r"|amazing|a lifesaver"
    r"|a star|right|so helpful)|works (?:now|great|perfectly|fine|like a charm|well)|i (?:really )?appreciate"
    r"|couldn't be better|nailed it|problem solved|thank(?:s| you) (?:so|very) much)\b",
    r"谢谢|多谢|感谢|太(?:好|棒|厉害)了|完美|非常好|很好|解决了|搞定了|正是我|有帮助|辛苦了",
)
NO_THANKS = (
    r"\b(?:but|however|except|although|though|unfortunately)\b|但是?|不过|可是|然而",
    r"\bin advance\b|\bthanks to\b|\bno,? thank|\bthanks for nothing\b",
    r"\b(?:not|isn't|wasn't|doesn't|didn't|never|would be|could be|if|was|should be) (?:\w+ )?(?:work\w*"
    r"|help\w*|great|perfect"
    r"|exactly|amazing|awesome|brilliant|excellent|wonderful|fantastic)\b",
    r"\bperfect (?:square|number|tense|cube|hash|match|storm|pitch)|如果|怎么|谢谢(?:卡|信|词)",
)

ACCEPTANCE = (
    r"^\W*(?:yes|yep|yeah|yup|ok|okay|sure|great|good|nice|cool|correct|sounds good|looks (?:good|great|fine"
    r"|right|nice)"
    r"|lgtm|fine|got it|makes sense|agreed|alright|exactly|approved|i see|understood|perfect|fair enough|good point"
    r"|go ahead|that'?s (?:it|right|correct|better|good|fine|all|ok|okay|nice|fair)|much better|better|right"
    r"|deal|sweet|neat"
    r"|not bad|no\W+that'?s all|no problem|interesting)\b(?!['-])",
    r"^\W*(?:好(?:的|吧|了|，|,|。|！|!|$)|可以|没错|没问题|对(?:的|，|。|！|$)|是的|嗯|行(?:，|。|吧|$)|不错|明白了|懂了|收到)",
)
NO_ACCEPTANCE = (
    r"\b(?:but|however|except|although|though|unfortunately|wait|not)\b|但是?|不过|可是|吗[？?]?\W*$",
    r"^\W*(?:good (?:morning|evening|afternoon|day|night|question)|nice to|right (?:now|after|before)"
    r"|fine[- ]tun|sure\?"
    r"|better (?:yet|to|than)|great (?:wall|britain|gatsby)|interesting (?:question|that)|exactly how"
    r"|good (?:luck|grief))",
    r"^\W*(?:yes|ok|okay|sure|right|correct|good)\s*\?",
)

TOOL_ERROR = (
    r"traceback \(most recent call last\)",
    r"\b(?:exit(?:ed)?(?: with)?(?: code| status)?|return ?code|exit_code|exitcode"
    r"|status code)\W{1,4}(?!0\b)-?\d+\b(?! ?ms)",
    r"^\W*(?:fatal|error|panic|failed|failure|exception)\b\W",
    r"^\s*(?:[\w./-]+:\s*)?(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b\s*:",
    r"\b(?:command not found|no such file or directory|permission denied|segmentation fault|core dumped"
    r"|access denied)\b",
    r"[\"']?is_?error[\"']?\s*[:=]\s*true",
    r"[\"'](?:error|errors|stderr_error)[\"']\s*:\s*(?!\s|null|false|none|\"\"|''|\[\]|\{\}|0)",
    r"<(?:tool_use_)?error>|\b(?:error|npm err)!|\bsyntax error\b|\bcompilation (?:failed|error)\b",
    r"\b[1-9]\d* (?:failed|errors?|failures?)\b",
    r"\b(?:timed out|timeout (?:expired|exceeded|after))\b|\b(?:invalid|unknown|missing|unexpected) (?:argument"
    r"|option|parameter|tool|function)s?\b",
    r"\bHTTP/?[\d.]* [45]\d\d\b|\bhttp error\b|\b(?:401 unauthorized|403 forbidden|404 not found"
    r"|500 internal server error)\b",
    r"\bno (?:match|matches|result|results) (?:was |were )?found for the (?:string|edit)"
    r"|\bstring to replace (?:was )?not found",
    r"错误[:：]|失败[:：]|异常[:：]",
)
NO_TOOL_ERROR: tuple[str, ...] = ()

HINTS = (
    r"\b(?:i|we) (?:actually |really |just |only |clearly |already )*(?:meant|wanted|asked (?:you )?(?:for|to)"
    r"|said|prefer)\b"
    r"\s*[:,]?\s*(?P<hint>[^.!?\n]+)",
    r"\bi(?:'d| would) (?:rather|prefer)\b\s*(?P<hint>[^.!?\n]+)",
    r"\b(?:it|that|this|the \w+) should (?:be|have been|say|return|read)\s+(?P<hint>[^.!?\n]+)",
    r"\b(?P<hint>(?:use|make|write|give|try|keep|put|show|answer|do)\b[^.!?\n]*\binstead\b[^.!?\n]*)",
    r"\b(?P<hint>(?:please|just) (?:use|make|write|give|try|keep|put|show|answer|do|don't|stop)\b[^.!?\n]+)",
    r"我(?:是说|的意思是|说的是|要的是|想要的是|问的是)[:：，,]?(?P<hint>[^。！？\n]+)",
)
"""Where a correction says what was wanted."""
