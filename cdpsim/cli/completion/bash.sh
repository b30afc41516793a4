
_cdpsim() {
    local word=${COMP_WORDS[COMP_CWORD]} known files last
    _cdpsim_find "$word" "${COMP_WORDS[@]:1:COMP_CWORD-1}"
    if [[ $word == = ]]; then word=; fi
    last=${word##*,} # of a list
    COMPREPLY=($(compgen -P "${word%"$last"}" -W "$known" -- "$last"))
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null # since bash 4: a slash behind folders, quotes where a name needs them
        local IFS=$'\n'
        COMPREPLY+=($(compgen "$files" -- "$word"))
    fi
}

complete -F _cdpsim cdpsim
