
_cdpsim() {
    local known files
    _cdpsim_find "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}"
    compset -P 1 '--*='
    case $files in
        -f) _files ;;
        -d) _files -/ ;;
    esac
    compset -P '*,' # of a list
    compadd -- ${=known}
}

if (( ! $+functions[compdef] )); then autoload -Uz compinit && compinit; fi
compdef _cdpsim cdpsim
