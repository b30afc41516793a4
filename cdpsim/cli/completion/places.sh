# Tab completion for cdpsim. `cdpsim completion` derives the table of places from the arguments of its commands.

# Set what may stand at a place of a command: 0, 1, ... or + (all further ones), behind an option, or - (its options).
_cdpsim_place() {
    known= files=
    case "$1 $2" in
        *[\<\>]) files=-f ;;
PLACES
        *) return 1 ;;
    esac
}

# Set `known` (names) and `files` (-f files, -d folders) for a word by the words before it.
_cdpsim_find() {
    local word=$1 given command= option= count=0
    shift
    for given; do
        if [[ $given == = ]]; then continue; fi # bash splits --option=value
        if [[ -n $option ]]; then
            option=
        elif [[ $given == -?* || $given == *[\<\>] ]]; then
            if _cdpsim_place "$command" "$given"; then option=$given; fi
        elif [[ -z $command ]]; then
            command=$given
        else
            count=$((count + 1))
        fi
    done
    if [[ -z $option && $word == --*=* ]]; then option=${word%%=*}; fi # zsh does not
    if [[ -n $option ]]; then
        _cdpsim_place "$command" "$option"
    elif [[ $word == -* ]]; then
        _cdpsim_place "$command" -
    else
        _cdpsim_place "$command" "$count" || _cdpsim_place "$command" +
    fi
}
